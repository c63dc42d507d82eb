"""The cache folder: finished things only, each made once however many processes ask for it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = "EAGLE3_RAY_CACHE"


def cache_folder(cache: Path | None = None) -> Path:
    """The folder asked for, or `$EAGLE3_RAY_CACHE`, or `~/.cache/eagle3_ray`."""
    chosen = cache or Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "eagle3_ray")
    folder = chosen.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file at `path`, waiting for whoever else holds it.

    The kernel lets go of the lock when the holder dies, so a killed install blocks nobody.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which holds {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
