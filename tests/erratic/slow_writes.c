// Preloaded into a process: writing, syncing and renaming take so many microseconds more below a folder.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *delay;
static const char *folder = "";

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SLOW_WRITES_US");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *shared = mmap(NULL, sizeof *delay, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) delay = shared;
    folder = getenv("SLOW_WRITES_BELOW");
    close(file);
}

static void wait_if_below(const char *path) {
    if (!delay || *delay <= 0 || strncmp(path, folder, strlen(folder))) return;
    struct timespec pause = {*delay / 1000000, *delay % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static void wait_for(int file) {
    if (!delay || *delay <= 0) return;
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    wait_if_below(path);
}

ssize_t write(int file, const void *data, size_t count) { wait_for(file); return syscall(SYS_write, file, data, count); }
ssize_t writev(int file, const struct iovec *parts, int count) { wait_for(file); return syscall(SYS_writev, file, parts, count); }
ssize_t pwrite(int file, const void *data, size_t count, off_t at) { wait_for(file); return syscall(SYS_pwrite64, file, data, count, at); }
ssize_t pwrite64(int file, const void *data, size_t count, off_t at) { wait_for(file); return syscall(SYS_pwrite64, file, data, count, at); }
int fsync(int file) { wait_for(file); return syscall(SYS_fsync, file); }
int fdatasync(int file) { wait_for(file); return syscall(SYS_fdatasync, file); }
int rename(const char *from, const char *to) { wait_if_below(to); return syscall(SYS_rename, from, to); }
