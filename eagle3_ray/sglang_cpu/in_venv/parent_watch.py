"""Ties the life of a process tree to the process that started it.

`python parent_watch.py COMMAND` does so for a command that knows nothing of it.
"""

import os
import select
import signal
import sys
import threading
import time

PARENT = "EAGLE3_RAY_SERVER_PARENT"
"""Environment: the process without which this one shall not live."""


def die_with_parent(poll_s: float = 0.5) -> None:
    """Kills the whole process group once the parent is gone, however it went.

    sglang 0.5.23: children ask the kernel for a signal at their parent's death, but only after importing torch, and
    the server asks for none. That signal is also tied to the *thread* that started the process; a server started from
    a short-lived thread would die early. The parent's process id has neither fault.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))
    os.environ[PARENT] = str(os.getpid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def replace_by(command: list[str]) -> None:
    """Becomes `command`, and leaves a process that kills the whole group once the parent or the command is gone.

    Ray 2.60 kills the children of a worker that ends, but not their children; so the command itself is the child, and
    the group does not outlive it either.
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
    os.execvp(command[0], command)


if __name__ == "__main__":
    replace_by(sys.argv[1:])
