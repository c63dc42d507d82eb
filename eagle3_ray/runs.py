"""A run directory: who may write to it, what its data was made with, and what is finished.

    RUN/manifest.json            per stage: fingerprint, versions, when, how often started
    RUN/generate/                all that one stage owns, so that setting it aside is one rename
    RUN/summaries/generate.json  the last summary of each stage
    RUN/last_job.json            how the last job ended, and why
    RUN/logs/STAGE.jsonl         what happened to it (run_log.py)
    RUN/quarantine/              what was set aside, never deleted

A fingerprint is a flat dictionary of everything that changes tokens. A stage refuses to add to data of another one.
"""

import fcntl
import json
import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_ray.json_files import read_object
from eagle3_ray.whole_files import sweep, temporary

SUCCESS = "_SUCCESS"
GENERATE, CAPTURE, TRAIN, EVALUATE = "generate", "capture", "train", "evaluate"
"""The stages of a run: their folders, and their names in the manifest."""
DRAFTER, INITIAL = "drafter", "initial"
"""Folders of the train stage: the drafter that came out, and the one that it began with."""

Fingerprint = Mapping[str, str | int | float | bool | None]


class RunError(RuntimeError):
    """A run directory cannot be used as asked; the message says what to do."""


class FingerprintMismatch(RunError):
    """The data in the run was made with other settings than these."""


class RunBusy(RunError):
    """Another job writes to the run."""


class RunDir:
    """One run directory; all paths in it and all that is written beside the data."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def stage(self, name: str) -> Path:
        """The folder that holds all of a stage's data."""
        return self.path / name

    def manifest(self) -> dict[str, Any]:
        """The manifest, empty where nothing ran yet."""
        path, remedy = self.path / "manifest.json", "Move the run directory aside and start another."
        manifest = read_json(path, remedy) if path.exists() else {}
        for stage, entry in manifest.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("fingerprint"), dict):
                raise RunError(f"{path} is damaged (its entry of {stage} has no fingerprint). {remedy}")
        return manifest

    def check(self, stage: str, fingerprint: Fingerprint) -> None:
        """Holds a fingerprint against the one that the stage's data was made with, where there is any.

        Raises:
            FingerprintMismatch: names each field that differs.
        """
        if not any(path.is_file() for path in self.stage(stage).rglob("*")):
            return  # a job was refused, or stopped, behind its claim
        known = self.manifest().get(stage, {}).get("fingerprint", fingerprint)
        differing = [field for field in {**known, **fingerprint} if known.get(field) != fingerprint.get(field)]
        if differing:
            said = "; ".join(
                f"{field} was {known.get(field)!r} and is now {fingerprint.get(field)!r}" for field in differing
            )
            raise FingerprintMismatch(
                f"{self.path} holds {stage} data made with other settings: {said}. Use another run.dir, or "
                f'"python jobs/doctor.py {self.path} --quarantine {stage}" to set the old data aside.'
            )

    def claim(self, stage: str, fingerprint: Fingerprint, about: Mapping[str, Any]) -> None:
        """Writes the stage's fingerprint into the manifest, or checks it; the stage counts as not complete.

        What a killed job was writing is removed.

        Raises:
            FingerprintMismatch: the stage has data that was made with other settings.
        """
        self.check(stage, fingerprint)
        sweep(self.stage(stage))
        (self.stage(stage) / SUCCESS).unlink(missing_ok=True)
        manifest = self.manifest()
        entry = manifest.setdefault(stage, {"created": _now(), "starts": 0})
        entry.update(about, fingerprint=dict(fingerprint), starts=entry["starts"] + 1, last_start=_now())
        write_json(self.path / "manifest.json", manifest)

    def write_summary(self, stage: str, summary: Mapping[str, Any]) -> None:
        """Keeps a stage's summary as RUN/summaries/STAGE.json."""
        write_json(self.path / "summaries" / f"{stage}.json", summary)

    def summary(self, stage: str) -> dict[str, Any] | None:
        """The last summary of a stage, None where there is none."""
        path = self.path / "summaries" / f"{stage}.json"
        return read_json(path, f"Remove it; jobs/{stage}.py writes it again.") if path.exists() else None

    def write_last_job(self, stage: str, started: float, status: str, cause: str | None) -> None:
        """Keeps in RUN/last_job.json how the last job goes ("running") or ended, and why, in one sentence."""
        ended = None if status == "running" else _now()
        about = {"stage": stage, "status": status, "started": _stamp(started), "ended": ended, "cause": cause}
        write_json(self.path / "last_job.json", about)

    def last_job_failed(self) -> str | None:
        """Stage, time and cause of the last job's end, for people; None where it is complete or still runs."""
        path = self.path / "last_job.json"
        if not path.exists() or WriterLock.is_held(self):
            return None
        job = read_json(path, "Remove it; the next job writes another.")
        if job["status"] == "complete":
            return None
        if job["status"] == "running":
            return (
                f"the last job ({job['stage']}, begun {job['started']}) was killed: it left no word of its end. "
                f"{self.path / 'logs' / job['stage']}.jsonl has what it did."
            )
        return f"the last job ({job['stage']}, {job['ended']}) {job['status']}: {job['cause']}"

    def succeeded(self, stage: str) -> bool:
        """Whether the stage's data is complete and checked; readers wait for this."""
        return (self.stage(stage) / SUCCESS).exists()

    def succeeded_with(self, stage: str, plan: str) -> bool:
        """Whether it is complete for this very plan, and not for an earlier, smaller one."""
        remedy = f"Remove it and run jobs/{stage}.py again."
        return self.succeeded(stage) and read_json(self.stage(stage) / SUCCESS, remedy).get("plan") == plan

    def succeed(self, stage: str, plan: str) -> None:
        """Marks the stage's data as complete for the plan of that key, after removing what its killed actors left."""
        sweep(self.stage(stage))
        write_json(self.stage(stage) / SUCCESS, {"plan": plan})

    def quarantine(self, stage: str) -> Path:
        """Moves a stage's data, manifest entry and summary to RUN/quarantine and returns the folder there.

        Raises:
            RunBusy: a job is writing to the run.
            RunError: the stage has no data.
        """
        with WriterLock(self):
            manifest = self.manifest()
            if not self.stage(stage).exists() and stage not in manifest:
                raise RunError(f"{self.path} has no {stage} data to set aside.")
            earlier = [int(path.name.rpartition("-")[2]) for path in (self.path / "quarantine").glob(f"{stage}-*")]
            aside = self.path / "quarantine" / f"{stage}-{max(earlier, default=0) + 1}"
            aside.mkdir(parents=True)
            write_json(aside / "manifest.json", {stage: manifest.pop(stage, None)})
            for source in (self.stage(stage), self.path / "summaries" / f"{stage}.json"):
                if source.exists():
                    os.replace(source, aside / source.name)
            write_json(self.path / "manifest.json", manifest)
        return aside


class WriterLock:
    """Holds a run for one job: a lock on RUN/.lock that ends with this process, however it ends.

    `token` is new each time and stands in the lock file, so that a task left over from a killed job can see that the
    run has another owner now (see `is_current`). On NFS the lock works across nodes from version 4 on.
    """

    def __init__(self, run: RunDir) -> None:
        self._path = run.path / ".lock"
        self._run = run
        self.token = uuid.uuid4().hex

    def __enter__(self) -> "WriterLock":
        try:
            self._run.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+")
        except OSError as error:
            raise RunError(
                f"run.dir {self._run.path} cannot be written: {error.strerror}. Choose another run.dir."
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RunBusy(
                f"Another job is writing to {self._run.path}; wait for it, or stop it with `ray job stop`."
            ) from None
        self._file.truncate(0)
        self._file.write(self.token)
        self._file.flush()
        os.fsync(self._file.fileno())  # other nodes see it on NFS
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @staticmethod
    def is_held(run: RunDir) -> bool:
        """Whether a job is writing to the run, for those who only look."""
        try:
            with open(run.path / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @staticmethod
    def is_current(run_path: str, token: str) -> bool:
        """Whether the job that holds `token` still owns the run."""
        return (Path(run_path) / ".lock").read_text() == token


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file of a run. Raises RunError: it holds no such thing; the message ends in `remedy`."""
    return read_object(path, remedy, RunError)


def command(argv: Sequence[str]) -> str:
    """A job's command line, to be typed again: `eagle3-generate ...`, or `python jobs/generate.py ...`."""
    script = Path(argv[0])
    return shlex.join(["python", *argv] if script.suffix == ".py" else [script.name, *argv[1:]])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary(path)
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _now() -> str:
    return _stamp(time.time())


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
