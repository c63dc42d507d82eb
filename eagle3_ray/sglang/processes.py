"""A server's process tree, as one thing that starts, answers, and ends without leaving anything behind.

The tree runs in a session of its own, so that one signal reaches all of it and a Ctrl-C at the terminal reaches none.
This module knows nothing of SGLang.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from eagle3_ray.sglang import parent_watch

HOST = "127.0.0.1"
LOG_LINES = 20
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
WATCHED = (sys.executable, parent_watch.__file__)
"""In front of a server's command: the server and all its processes end with this one, however it ends."""


class ServerFailed(RuntimeError):
    """The server ended or stayed silent; the message ends with the last lines of its log."""


def clean_environment() -> dict[str, str]:
    """This process's environment, less what would put our packages in front of those of an SGLang's own Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def free_port() -> int:
    """A port that nobody listens on and that the kernel gives to nobody else for about a minute.

    A closed connection leaves the port in TIME_WAIT: the kernel does not choose it for others, while a server that
    names it and sets SO_REUSEADDR, as uvicorn does, may bind it. Servers can so start side by side.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))
        listener.listen(1)
        port: int = listener.getsockname()[1]
        with socket.create_connection((HOST, port)):
            accepted, _ = listener.accept()
            accepted.close()
    return port


def require_free(port: int) -> None:
    """Without this check the health wait would take another server's answer for ours."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise ServerFailed(f"Port {port} is taken ({error}): choose another, or 0 for a free one.") from error


def group_members(group: int) -> list[int]:
    """The living processes of a process group. A zombie counts as dead: in a container nobody may reap it."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # proc(5): "pid (name) state ppid pgrp ..."; the name may hold spaces and brackets
                state, _, group_of_entry, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(group_of_entry) == group and state != "Z":
                    members.append(int(entry.name))
    return members


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


class ServerProcess:
    """Runs `command`; `start()`, or entering the `with` block, returns once `url`/health answers 200."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        port: int,
        env: Mapping[str, str],
        log: Path | None,
        startup_timeout_s: float,
        host: str = HOST,
    ) -> None:
        self.port = port
        self.url = f"http://{host}:{port}"
        self.log = log or Path(tempfile.mkdtemp(prefix="sglang-cpu-")) / "server.log"
        self._command = list(map(str, command))
        self._env = dict(env)
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The first process of the tree; also the number of its process group."""
        if self._process is None:
            raise ServerFailed("The server was not started: call start(), or use it in a with statement.")
        return self._process.pid

    def start(self) -> Self:
        require_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env | {parent_watch.PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with ExitStack() as undo:
            undo.callback(self.kill)
            self._wait_until_healthy(self._process)
            undo.pop_all()
        return self

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._startup_timeout_s
        while not self.healthy():
            if process.poll() is not None:
                raise self._failure(f"The server ended while starting, {ending(process.returncode)}")
            if time.monotonic() > deadline:
                raise self._failure(
                    f"The server gave no healthy answer within {self._startup_timeout_s:g} s (startup_timeout_s)"
                )
            time.sleep(POLL_S)

    def _failure(self, what: str) -> ServerFailed:
        return ServerFailed(f"{what}. The last lines of {self.log} say why:\n{last_lines(self.log)}")

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self) -> None:
        """Blocks for as long as the server lives; its end is a failure, since nobody asked for it."""
        if self._process is not None:
            code = self._process.wait()
            raise self._failure(f"The server ended, {ending(code)}")

    def stop(self) -> None:
        """Ends the server as a user would, SIGTERM first; whatever is left after ten seconds is killed."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """kill -9 of every process of the server at once; returns when the last one is gone."""
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while group_members(self._process.pid):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"Processes {group_members(self._process.pid)} outlived kill -9 by {STOP_TIMEOUT_S:g} s: "
                    "they hang in the kernel; check the machine's disk and memory."
                )
            time.sleep(POLL_S)
        self._process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
