"""Which running server is whose: states come through a machine's shared memory, so each target has one beside it."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from eagle3_ray.target.files import TargetError


@dataclass(frozen=True)
class Endpoint:
    """A server that is this process's for as long as `lock` is open, which ends with the process."""

    url: str
    lock: IO[str]


def claim(urls: Sequence[str]) -> Endpoint:
    """One of the servers that run on this machine and that no other target has.

    Raises:
        TargetError: there is none.
    """
    for url in urls:
        place = urlsplit(url)
        if not _is_here(place.hostname or ""):
            continue
        path = Path(tempfile.gettempdir(), f"eagle3_ray-{os.getuid()}-{place.port}.lock")
        lock = path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return Endpoint(url, lock)
    raise TargetError(
        f"None of capture.endpoints={','.join(urls)} is free on {socket.gethostname()}: each of capture.targets needs "
        "a server of its own on the machine where Ray places it. Start one there, or lower capture.targets."
    )


def _is_here(host: str) -> bool:
    """Whether it names this machine: only own addresses can be bound."""
    try:
        with socket.socket() as listener:
            listener.bind((socket.gethostbyname(host), 0))
    except OSError:
        return False
    return True
