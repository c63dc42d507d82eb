// Preloaded into a process: below a folder, writing takes so many microseconds more for each KiB, and syncing or
// renaming as many as SEEK bytes.
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
    const char *path = getenv("SLOW_WRITES_US_PER_KIB");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *shared = mmap(NULL, sizeof *delay, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) delay = shared;
    folder = getenv("SLOW_WRITES_BELOW");
    close(file);
}

static void wait_if_below(const char *path, size_t count) {
    if (!delay || *delay <= 0 || strncmp(path, folder, strlen(folder))) return;
    int64_t us = *delay * (int64_t)count / 1024;
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static void wait_for(int file, size_t count) {
    if (!delay || *delay <= 0) return;
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    wait_if_below(path, count);
}

#define SEEK 16384  // what syncing or renaming costs, in bytes that could have been written

ssize_t write(int file, const void *data, size_t count) {
    wait_for(file, count);
    return syscall(SYS_write, file, data, count);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
    wait_for(file, bytes);
    return syscall(SYS_writev, file, parts, count);
}
ssize_t pwrite(int file, const void *data, size_t count, off_t at) {
    wait_for(file, count);
    return syscall(SYS_pwrite64, file, data, count, at);
}
ssize_t pwrite64(int file, const void *data, size_t count, off_t at) { return pwrite(file, data, count, at); }
int fsync(int file) {
    wait_for(file, SEEK);
    return syscall(SYS_fsync, file);
}
int fdatasync(int file) {
    wait_for(file, SEEK);
    return syscall(SYS_fdatasync, file);
}
int rename(const char *from, const char *to) {
    wait_if_below(to, SEEK);
    return syscall(SYS_rename, from, to);
}
