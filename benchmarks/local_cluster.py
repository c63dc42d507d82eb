"""A Ray cluster of this machine for a benchmark: its own ports and folder, and all its processes ended behind it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """A cluster of its own ports and folder; at the end exactly its processes are ended, all in one session."""
    say("starting a Ray cluster ...")
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={free_port()}"]
    command += ["--include-dashboard=false", "--num-cpus=4", f"--temp-dir={folder}"]
    with tempfile.TemporaryFile("w+") as log:
        head = subprocess.Popen(
            command, env=ray_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 120
            while True:
                log.seek(0)
                if "Ray runtime started" in log.read():
                    break
                if head.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"ray start failed:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            end_session(head)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    leader.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(20)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        for pid in session_members(leader.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while session_members(leader.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    leader.wait(5)


def session_members(session: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
            if int(found) == session and state != "Z":
                members.append(int(stat.parent.name))
    return members


def ray_environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port: int = probing.getsockname()[1]
        return port


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
