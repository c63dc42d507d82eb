"""How a stage is carried out: logged from its start to its end, and its end told in one place, whatever ends it.

RUN/last_job.json says how the last job ended and why, in one sentence. It is there from the start of the job, so that
a job that could write nothing more (kill -9, a lost node) is told from one that is complete.
"""

import functools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from eagle3_ray import run_log
from eagle3_ray.config import Config, ConfigError
from eagle3_ray.errors import explain, root_cause
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.runs import RunDir, RunError, WriterLock
from eagle3_ray.sglang.probe import Unfit
from eagle3_ray.sglang.processes import ServerFailed
from eagle3_ray.target.files import TargetError

SETUP_ERRORS = (ConfigError, PromptSourceError, RunError, ServerFailed, TargetError, Unfit)
"""Something has to be changed first; the message says what."""

Summary = dict[str, Any]
Stage = Callable[[Config], Summary]


@dataclass(frozen=True)
class _Start:
    """When a job began: by the clock that people read, and by the one that nobody sets."""

    stamp: float
    monotonic: float


def carried_out(stage: str) -> Callable[[Stage], Stage]:
    """Decorates a stage's `run`: whatever ends it leaves its sentence in RUN/last_job.json and in the stage's log.

    SIGTERM, Ctrl-C, a lost cluster and a full disk before or behind the stage's own work end in a summary with the
    status "stopped"; setup errors are raised as they are, whatever Ray wraps around them, and so is everything else.
    """

    def decorate(run: Stage) -> Stage:
        @functools.wraps(run)
        def whole(config: Config) -> Summary:
            run_dir = RunDir(config.run.dir)
            if _belongs_to_another(run_dir):
                return run(config)  # which is refused; the log and the last job are the other's
            with run_log.writing(run_dir.path, stage):
                return _watched(stage, run, config, run_dir)

        return whole

    return decorate


def _watched(stage: str, run: Stage, config: Config, run_dir: RunDir) -> Summary:
    started = _Start(time.time(), time.monotonic())
    run_log.event("job started")
    _remember(run_dir, stage, started, "running", None)
    try:
        summary = run(config)
    except (SystemExit, KeyboardInterrupt) as end:
        summary = _stopped(stage, run_dir, explain(end))
    except BaseException as error:
        cause = root_cause(error)
        refused = isinstance(cause, SETUP_ERRORS)
        if refused or not isinstance(error, ray.exceptions.RayError | OSError):
            _end(run_dir, stage, started, "refused" if refused else "failed", sentence(error))
            if refused and cause is not error:
                raise cause from None
            raise
        summary = _stopped(stage, run_dir, sentence(error))
    _end(run_dir, stage, started, summary["status"], _cause(summary))
    return summary


def _cause(summary: Summary) -> str | None:
    """Why a stage is not complete: what stopped it, else the last of the rows that it has to try again."""
    if summary["status"] == "complete":
        return None
    last = summary.get("last_failure")
    return summary["stopped_by"] or (f"rows failed, the last is {last}" if last else "some of its work is left to do")


def _stopped(stage: str, run_dir: RunDir, by: str) -> Summary:
    return {"stage": stage, "status": "stopped", "stopped_by": by, "run_dir": str(run_dir.path), "warnings": []}


def sentence(error: BaseException) -> str:
    """What ended a job, on one line: of a longer message its beginning and its end, where a traceback has its cause."""
    lines = [line.strip() for line in explain(root_cause(error)).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _end(run_dir: RunDir, stage: str, started: _Start, status: str, cause: str | None) -> None:
    seconds = round(time.monotonic() - started.monotonic, 1)
    if status == "complete":
        run_log.event("job complete", seconds=seconds)
    else:
        run_log.event(f"job {status}", logging.ERROR, cause=cause, seconds=seconds)
    _remember(run_dir, stage, started, status, cause)


def _remember(run_dir: RunDir, stage: str, started: _Start, status: str, cause: str | None) -> None:
    with suppress(OSError):  # a run directory that cannot be written is what the job itself complains of
        run_dir.write_last_job(stage, started.stamp, status, cause)


def _belongs_to_another(run_dir: RunDir) -> bool:
    try:
        return WriterLock.is_held(run_dir)
    except OSError:  # no folder, or not ours to read: the stage's own lock says so
        return False
