"""The index of a mirror: what a run holds at one moment, and how it is made of it again.

A moment is what two looks in a row see alike: whatever a job does to its files, the run was so between the two. So an
index is what the disk would hold had the job been killed then, and every stage goes on from a kill. Hidden files are in
the making, or belong to this machine (.lock): they are no part of it, and neither are rows that are not committed.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from eagle3_ray.object_store import ObjectStore
from eagle3_ray.run_log import say
from eagle3_ray.runs import RunError

INDEX, FILES = "index.json", "files"
_STAGING, _FETCHED = ".fetching", ".fetched"
_STREAMS = 8
CHUNK = 8 << 20
_LOOKS = 20
_PENDING = ".pending.parquet"  # of Ray Data's checkpoint: the rows of that name are not whole yet
_LEFT_OUT = ("train/ray", "generate/plan.new")  # Ray's record of one start; a plan in the making
_APPENDED = ("journal", "logs", "tensorboard")
_GROWING = ("steps.jsonl",)

Entry = dict[str, Any]
"""A file of the index: {"size", "mtime", "parts": [[object, bytes, sha256], ...]}, or {"link": target}."""


@dataclass(frozen=True)
class Seen:
    """What a look at a file tells; `mtime` in nanoseconds."""

    size: int
    mtime: int
    link: str | None = None


def moment(run: Path) -> dict[str, Seen]:
    """All that a run holds, by path. Raises OSError: it does not stand still for two looks."""
    before: dict[str, Seen] | None = None
    for _ in range(_LOOKS):
        try:
            now = dict(_look(run, ""))
        except FileNotFoundError:  # moved or removed under the look
            before = None
            continue
        if before is not None and _alike(before, now):
            pending = tuple(Path(path).name.removesuffix(_PENDING) for path in now if path.endswith(_PENDING))
            return {path: seen for path, seen in now.items() if not Path(path).name.startswith(pending)}
        before = now
    raise OSError(f"{run} changes faster than it can be looked at")


def _alike(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> bool:
    return before.keys() == now.keys() and all(grows(path) or now[path] == before[path] for path in now)


def _look(folder: Path, prefix: str) -> Iterator[tuple[str, Seen]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.name.startswith(".") or path in _LEFT_OUT:
                continue
            if entry.is_symlink() and not _leads_out(os.readlink(entry.path)):
                yield path, Seen(0, 0, os.readlink(entry.path))
            elif entry.is_dir():  # a link to a folder on another disk, too: the mirror has to outlive that one as well
                if folder.resolve().is_relative_to(Path(entry.path).resolve()):
                    raise OSError(f"{entry.path} is a link to what it is in; remove it")
                yield from _look(Path(entry.path), f"{path}/")
            else:
                about = entry.stat()
                yield path, Seen(about.st_size, about.st_mtime_ns)


def _leads_out(link: str) -> bool:
    return "/" in link or link.startswith(".")


def is_appended(path: str) -> bool:
    """Whether what is in the file stays as it is, and more comes behind it."""
    return PurePosixPath(path).parent.name in _APPENDED


def grows(path: str) -> bool:
    """Whether the file is written to while the job works; its beginning is as good as a kill would leave it."""
    return is_appended(path) or PurePosixPath(path).name in _GROWING


def objects(files: Mapping[str, Entry]) -> set[str]:
    """The names of all objects that the files are made of."""
    return {part[0] for entry in files.values() for part in entry.get("parts", ())}


def write(store: ObjectStore, files: Mapping[str, Entry]) -> None:
    """Replaces the index. Raises FAILURES."""
    store.replace(INDEX, {"files": files, "seal": _seal(files)})


def read(store: ObjectStore) -> dict[str, Entry]:
    """The files of the index, none where there is no index. Raises FAILURES; RunError: it is damaged."""
    index = store.read(INDEX)
    if index is None:
        return {}
    files: dict[str, Entry] = index.get("files", {})
    if index.get("seal") != _seal(files):
        raise _damaged(INDEX)
    return files


def _seal(files: Mapping[str, Entry]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _damaged(name: str) -> RunError:
    """What to say of an object that is not what was written."""
    return RunError(f"run.mirror is damaged: {name} is not what was written there. Give another run.mirror.")


def _fetch_file(store: ObjectStore, staging: Path, path: str, entry: Entry) -> None:
    """Makes a file of the index in `staging`, unless it is there. Raises FAILURES; RunError: it is damaged."""
    place, link = staging / path, entry.get("link")
    leads_out = link is not None and _leads_out(link)
    if leads_out or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise _damaged(f"{path} in {INDEX}")
    place.parent.mkdir(parents=True, exist_ok=True)
    if link is not None:
        place.unlink(missing_ok=True)
        place.symlink_to(link)
        return
    if place.exists() and (place.stat().st_size, place.stat().st_mtime_ns) == (entry["size"], entry["mtime"]):
        return  # fetched by a job that was killed
    fresh = staging / f".{uuid.uuid4().hex}"
    with fresh.open("wb") as file:
        for name, _, sha256 in entry["parts"]:
            digest = hashlib.sha256()
            with store.reading(f"{FILES}/{name}") as stream:
                while chunk := stream.read(CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
            if digest.hexdigest() != sha256:
                raise _damaged(f"{FILES}/{name}")
    os.utime(fresh, ns=(entry["mtime"], entry["mtime"]))  # by which the next copy knows that the mirror has it
    os.replace(fresh, place)


def fetch(store: ObjectStore, run: Path) -> dict[str, Entry]:
    """Brings the run to the empty folder `run` and returns its index. Raises FAILURES; RunError: it is damaged."""
    staging = run / _STAGING
    files = read(store)
    while files:
        size = sum(entry.get("size", 0) for entry in files.values())
        say(f"fetching {len(files):,} files, {size / 1e9:.2f} GB, to {run}")
        each(partial(_fetch_file, store, staging), files.keys(), files.values())
        newer = read(store)
        if newer == files:
            break
        files = newer  # the job before this one had not noticed yet
    for path in [path for path, _ in _look(staging, "")] if files else ():
        if path not in files:
            (staging / path).unlink()  # of a fetch that was killed
    if files:
        os.replace(staging, run / _FETCHED)
        unpack(run)
    return files


def unpack(run: Path) -> None:
    """Moves what was fetched to its place, if a kill left that to do."""
    fetched = run / _FETCHED
    if fetched.exists():
        for entry in sorted(fetched.iterdir()):
            if not entry.name.startswith("."):
                os.replace(entry, run / entry.name)
        shutil.rmtree(fetched)


def each(work: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
    """What `map` gives, several calls at once; the first error ends it."""
    with ThreadPoolExecutor(_STREAMS) as streams:
        return list(streams.map(work, *items))
