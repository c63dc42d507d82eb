"""`python parent_watch.py COMMAND`: a command whose process group ends with the process that started it."""

import os
import select
import signal
import sys

PARENT = "EAGLE3_RAY_SERVER_PARENT"
"""Environment: the process without which the command shall not live; the one that started it where it is not told."""


def replace_by(command: list[str]) -> None:
    """Becomes `command`, and leaves a process that kills the whole group once the parent or the command is gone.

    sglang 0.5.23: children ask the kernel for a signal at their parent's death, but only after importing torch, and
    the server asks for none. That signal is also tied to the *thread* that started the process. Ray 2.60 kills the
    children of a worker that ends, but not their children; so the command itself is the child.
    """
    parent, ours = int(os.environ.get(PARENT, os.getppid())), os.getpid()
    if os.fork() == 0:
        ends = select.poll()
        try:
            for process in (parent, ours):
                ends.register(os.pidfd_open(process), select.POLLIN)
            ends.poll()
        except ProcessLookupError:
            pass  # it is gone already
        os.killpg(os.getpgrp(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    replace_by(sys.argv[1:])
