"""A copy of a run in an object store or another folder (run.mirror), so that a run outlives the disk that it lies on.

    MIRROR/owner.json          the job that mirrors here, and from where: the last one that began
    MIRROR/index.json          the run's files at one moment, and the objects that each is made of (mirror_index.py)
    MIRROR/files/PATH~JOB.N    those objects; no name is written twice

The index is replaced in one piece, behind the objects that it names and before those are deleted that it names no more.
So a copy that breaks off anywhere leaves the moment before it.

A job that begins with an empty run.dir fetches what the index names. One whose run.dir is not the last that was
mirrored here is refused; one that finds a later job in owner.json mirrors no more and stops.
"""

import hashlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from eagle3_ray import mirror_index as index
from eagle3_ray import run_log
from eagle3_ray.errors import explain
from eagle3_ray.mirror_index import CHUNK, FILES, Entry, Seen
from eagle3_ray.object_store import FAILURES, ObjectStore
from eagle3_ray.run_log import say
from eagle3_ray.runs import RunDir, RunError, WriterLock, read_json, write_json

EVERY_S = 10.0
_OWNER, _TOKENS = "owner.json", ".mirror"
_TRIES = 5

Summary = dict[str, Any]


class TakenOver(Exception):
    """A later job mirrors to this place, from another run directory."""


def mirrored(work: Callable[[], Summary], run: str, url: str) -> Summary:
    """Does a job's work with its run fetched before, mirrored meanwhile, and copied a last time however it ends.

    The summary gets `mirror`, how far the copy is, and a warning where that is not the end.

    Raises:
        RunError: the mirror cannot be reached, or is not of this run; before the work begins.
    """
    with Mirror(run, url) as mirror:
        summary = work()
        mirror.hurried = str(summary["stopped_by"]).endswith(("SIGTERM", "Ctrl-C"))
    return mirror.told(summary)


def to_fetch(run: str, url: str) -> str | None:
    """What a job would fetch first, for people; None where there is nothing to fetch. Raises RunError: no access."""
    try:
        files = index.read(ObjectStore(url)) if _is_empty(Path(run)) else {}
    except FAILURES as error:
        raise RunError(f"{_name(url)} cannot be used: {explain(error)}") from None
    if not files:
        return None
    return f"{run} is empty: the job fetches {len(files):,} files from {_name(url)} and goes on from there"


class Mirror:
    """Copies `run` to `url` while it is entered, and then once more; `stop_job` ends a job that was taken over."""

    def __init__(self, run: str | Path, url: str, stop_job: Callable[[], None] | None = None) -> None:
        self._run, self._url, self._name = Path(run), url, _name(url)
        self._stop_job = stop_job or (lambda: os.kill(os.getpid(), signal.SIGTERM))
        self._token = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._end, self._given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._copied: float | None = None
        self._trouble: str | None = None
        self._taken_over = self._whole = self.hurried = False

    def __enter__(self) -> "Mirror":
        with WriterLock(RunDir(self._run)):
            try:
                self._join()
            except FAILURES as error:
                raise RunError(f"{self._name} cannot be used: {explain(error)}") from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last copy; after SIGTERM for half of the time that Ray gives a job to end."""
        hurried = self.hurried or (kind is not None and not issubclass(kind, Exception))
        self._end.set()
        self._thread.join(float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3")) / 2 if hurried else None)
        self._given_up = True

    def told(self, summary: Summary) -> Summary:
        """The summary, with how far the mirror is."""
        copied = None if self._copied is None else _stamp(self._copied)
        summary = summary | {
            "mirror": {"place": self._url.partition("?")[0], "copied": copied, "complete": self._whole}
        }
        if self._whole:
            return summary
        why = self._trouble or "the end of the job left no time for it"
        lacking = f"all that was written after {copied}" if copied else "all that this job wrote"
        stopped_by = why if self._taken_over else summary["stopped_by"]
        warning = f"{self._name} lacks {lacking}: {why}"
        return summary | {"stopped_by": stopped_by, "warnings": [*summary["warnings"], warning]}

    # ---- a job begins

    def _join(self) -> None:
        """Makes the mirror ours, and brings the run here if nothing of one is here."""
        self._store = ObjectStore(self._url)
        index.unpack(self._run)
        owner, tokens, empty = self._store.read(_OWNER), self._run / _TOKENS, _is_empty(self._run)
        ours = read_json(tokens, "Remove it.")["tokens"] if tokens.exists() else []
        if owner is None and self._store.names():
            raise RunError(f"{self._name} holds files that are no mirror. Give an empty place.")
        if owner is not None and not empty and owner.get("token") not in ours:
            raise RunError(
                f"{self._name} holds another run than {self._run}, or went on without it: {_who(owner)} was "
                "the last to write there. Give an empty run.dir to go on from the mirror, or another run.mirror."
            )
        before = [owner["token"]] if owner is not None and not empty else []
        write_json(tokens, {"tokens": [self._token, *before]})  # a kill may come before the next line
        about = {"host": socket.gethostname(), "run": str(self._run), "since": _stamp(time.time())}
        self._store.replace(_OWNER, {"token": self._token, **about})
        self._index = index.fetch(self._store, self._run) if empty else index.read(self._store)
        self._known = dict(self._index)  # what is uploaded, in the index or not yet
        self._objects = index.objects(self._index)

    # ---- a job works

    def _work(self) -> None:
        while not self._end.wait(EVERY_S):
            self._try()
        self._whole = not self._taken_over and (self._try() or self._try())
        if self._whole:
            self._sweep()

    def _try(self) -> bool:
        """Copies; the job goes on where that fails."""
        known = self._trouble
        try:
            self.copy()
        except TakenOver as end:
            self._taken_over, self._trouble = True, str(end)
            say(f"WARNING: {self._name}: {end}")
            run_log.event("mirror taken over", logging.WARNING, cause=str(end))
            if not self._end.is_set():
                self._end.set()
                self._stop_job()
        except (*FAILURES, ValueError) as error:  # ValueError: a file name that is not UTF-8
            self._trouble = explain(error)
            if known is None and not self._given_up:
                say(f"WARNING: {self._name} is behind: {self._trouble}")
                run_log.event("mirror behind", logging.WARNING, cause=self._trouble)
        else:
            self._trouble = None
            if known is not None:
                say(f"{self._name} has caught up")
                run_log.event("mirror caught up")
            return True
        return False

    def copy(self) -> None:
        """Brings the mirror to where the run is now. Raises FAILURES, TakenOver: the mirror is as it was."""
        self._check_owner()
        started = time.time()
        files = self._upload_all()
        if files != self._index:
            self._check_owner()  # the uploads may have taken long
            index.write(self._store, files)
            self._index = files
        self._copied = started
        self._delete(self._objects - index.objects(files))
        self._objects = index.objects(files)

    def _upload_all(self) -> dict[str, Entry]:
        for _ in range(_TRIES):
            seen = index.moment(self._run)
            entries = index.each(self._entry, seen.keys(), seen.values())
            files = {path: entry for path, entry in zip(seen, entries, strict=True) if entry is not None}
            if len(files) == len(seen):
                return files
        raise OSError(f"{self._run} changes faster than it can be copied")

    def _entry(self, path: str, seen: Seen) -> Entry | None:
        """The file in the index, what is new of it uploaded; None where the file is not what was seen any more."""
        if seen.link is not None:
            return {"link": seen.link}
        known = self._known.get(path, {})
        if (known.get("size"), known.get("mtime")) == (seen.size, seen.mtime):
            return known
        parts = list(known.get("parts", ())) if index.is_appended(path) and known.get("size", 0) < seen.size else []
        start = sum(part[1] for part in parts)
        while parts and parts[-1][1] <= seen.size - start:  # joined with what is behind it: parts stay few
            start -= parts.pop()[1]
        part = self._upload(path, start, seen)
        if part is None:
            return None
        self._known[path] = {"size": seen.size, "mtime": seen.mtime, "parts": [*parts, part]}
        return self._known[path]

    def _upload(self, path: str, start: int, seen: Seen) -> list[Any] | None:
        """Uploads a file from `start` to the size that was seen; returns object, bytes and hash."""
        name, digest, left = f"{path}~{self._token[:8]}.{next(self._numbers)}", hashlib.sha256(), seen.size - start
        try:
            file = (self._run / path).open("rb")
        except FileNotFoundError:
            return None
        self._objects.add(name)
        with file, self._store.writing(f"{FILES}/{name}") as stream:
            file.seek(start)
            while left and (chunk := file.read(min(CHUNK, left))):
                if self._given_up:
                    raise OSError("the job has ended")
                stream.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
            now = os.fstat(file.fileno())
        same = index.grows(path) or (now.st_size, now.st_mtime_ns) == (seen.size, seen.mtime)
        return [name, seen.size - start, digest.hexdigest()] if same and not left else None

    def _check_owner(self) -> None:
        owner = self._store.read(_OWNER)
        if owner is None:
            raise FileNotFoundError(f"{_OWNER} is gone")
        if owner.get("token") != self._token:
            raise TakenOver(f"the run went on elsewhere, by {_who(owner)}")

    def _sweep(self) -> None:
        """Deletes what killed jobs had uploaded for an index that they did not write any more."""
        with suppress(*FAILURES):
            self._delete(self._store.names(FILES) - self._objects)

    def _delete(self, names: Iterable[str]) -> None:
        index.each(lambda name: self._store.delete(f"{FILES}/{name}"), names)


def _is_empty(run: Path) -> bool:
    return not run.exists() or all(path.name.startswith(".") for path in run.iterdir())


def _name(url: str) -> str:
    """The setting as it stands in messages, without the options behind the path."""
    return f"run.mirror={url.partition('?')[0]}"


def _who(owner: dict[str, Any]) -> str:
    return f"the job of {owner.get('since')} on {owner.get('host')} in {owner.get('run')}"


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
