"""Whatever ends a stage, one place says which, when and why."""

import errno
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from eagle3_ray import doctor, run_log
from eagle3_ray.config import Config, ConfigError
from eagle3_ray.runs import RunBusy, RunDir, RunError, WriterLock
from eagle3_ray.stages import carried_out, sentence


def config(run: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(run)}, "target": {"model": "m"}, "prompts": {"path": "p"}})


def stage_that(does: Callable[[], Any], name: str = "capture") -> Callable[[Path], dict[str, Any]]:
    """A stage that takes the run for itself, as all do, and then does that."""

    @carried_out(name)
    def run(config: Config) -> dict[str, Any]:
        with WriterLock(RunDir(config.run.dir)):
            found: dict[str, Any] = does()
            return found

    return lambda path: run(config(path))


def raising(error: BaseException) -> Callable[[], Any]:
    def does() -> Any:
        raise error

    return does


def last_job(run: Path) -> dict[str, Any]:
    job: dict[str, Any] = json.loads((run / "last_job.json").read_text())
    return job


def log(run: Path, stage: str = "capture") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / f"{stage}.jsonl").read_text().splitlines()]


COMPLETE = {"stage": "capture", "status": "complete", "stopped_by": None, "warnings": []}


def test_a_complete_stage_is_told_by_its_log_and_leaves_no_failure(tmp_path: Path) -> None:
    before = time.time()
    assert stage_that(lambda: COMPLETE)(tmp_path) == COMPLETE
    first, last = log(tmp_path)
    assert (first["event"], last["event"], first["level"]) == ("job started", "job complete", "INFO")
    assert set(first) == {"time", "run", "stage", "level", "event"}
    assert (first["run"], first["stage"]) == (str(tmp_path), "capture")
    written = time.mktime(time.strptime(first["time"][:19], "%Y-%m-%dT%H:%M:%S"))
    assert int(before) <= written <= time.time()
    assert (last_job(tmp_path)["status"], last_job(tmp_path)["cause"]) == ("complete", None)
    assert RunDir(tmp_path).last_job_failed() is None


def test_an_incomplete_stage_names_the_last_row_that_failed(tmp_path: Path) -> None:
    summary = {**COMPLETE, "status": "incomplete", "last_failure": "math/p7: 6 attempts failed"}
    stage_that(lambda: summary)(tmp_path)
    assert last_job(tmp_path)["cause"] == "rows failed, the last is math/p7: 6 attempts failed"
    assert log(tmp_path)[-1]["event"] == "job incomplete"


WRAPPED = RayTaskError("f", "Traceback\n  ...\nKeyError: 'x'", KeyError("x"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SystemExit(143), "SIGTERM"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (OSError(errno.ENOSPC, "No space left on device", "/r/a"), "The disk is full (/r/a). Free some space and run"),
        (WRAPPED, "KeyError: 'x'"),
    ],
)
def test_an_end_that_is_nobodys_bug_gives_a_summary(error: BaseException, cause: str, tmp_path: Path) -> None:
    summary = stage_that(raising(error))(tmp_path)
    assert (summary["stage"], summary["status"], summary["warnings"]) == ("capture", "stopped", [])
    assert summary["stopped_by"].startswith(cause)
    assert last_job(tmp_path)["cause"] == summary["stopped_by"] == log(tmp_path)[-1]["cause"]
    assert (log(tmp_path)[-1]["event"], log(tmp_path)[-1]["level"]) == ("job stopped", "ERROR")
    failed = RunDir(tmp_path).last_job_failed()
    assert failed == f"the last job (capture, {last_job(tmp_path)['ended']}) stopped: {summary['stopped_by']}"


@pytest.mark.parametrize(
    ("error", "raised", "status", "cause"),
    [
        (ConfigError("set x"), ConfigError, "refused", "ConfigError: set x"),
        (RayTaskError("f", "Traceback", RunError("move y")), RunError, "refused", "RunError: move y"),
        (ZeroDivisionError("by 0"), ZeroDivisionError, "failed", "ZeroDivisionError: by 0"),
    ],
)
def test_a_setup_error_and_a_bug_are_noted_and_raised(
    error: Exception, raised: type[Exception], status: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(raised) as found:
        stage_that(raising(error))(tmp_path)
    assert type(found.value) is raised
    assert (last_job(tmp_path)["status"], last_job(tmp_path)["cause"]) == (status, cause)
    assert (log(tmp_path)[-1]["event"], log(tmp_path)[-1]["cause"]) == (f"job {status}", cause)


def test_a_killed_job_is_told_from_one_that_runs_and_from_one_that_ended(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    told = []

    def look() -> Any:
        told.append(run.last_job_failed())
        told.append(last_job(tmp_path)["status"])
        return COMPLETE

    stage_that(look)(tmp_path)
    assert told == [None, "running"]
    run.write_last_job("train", time.time(), "running", None)  # and then nothing: kill -9
    assert "was killed: it left no word of its end" in str(run.last_job_failed())
    assert str(tmp_path / "logs" / "train.jsonl") in str(run.last_job_failed())


def test_a_second_job_leaves_the_first_ones_record_alone(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    with WriterLock(first):
        first.write_last_job("train", time.time(), "running", None)
        with pytest.raises(RunBusy):
            stage_that(lambda: COMPLETE)(tmp_path)
        assert (last_job(tmp_path)["stage"], last_job(tmp_path)["status"]) == ("train", "running")
    assert not (tmp_path / "logs").exists()


def test_a_run_directory_that_cannot_be_is_refused_by_the_stage_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        stage_that(lambda: COMPLETE)(tmp_path / "file" / "run")


def test_the_doctor_begins_with_what_ended_the_last_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        stage_that(raising(ConfigError("target.model=x is no folder")), "generate")(tmp_path)
    first, second = doctor.describe(RunDir(tmp_path)).splitlines()
    assert first == str(tmp_path)
    assert second.startswith("  PROBLEM: the last job (generate, 20")
    assert second.endswith("refused: ConfigError: target.model=x is no folder")


def test_of_a_long_message_the_first_line_and_the_cause_at_its_end_are_kept() -> None:
    assert sentence(RuntimeError("The server ended. Its log:\n  loading\nOutOfMemory: 80 GB\n")) == (
        "RuntimeError: The server ended. Its log: ... OutOfMemory: 80 GB"
    )


def test_events_go_to_the_log_of_the_stage_that_runs_and_else_nowhere(tmp_path: Path) -> None:
    run_log.event("row rejected", sequence_id="a")
    with run_log.writing(tmp_path, "generate"):
        run_log.event("row rejected", sequence_id="b", where=tmp_path)
    run_log.event("row rejected", sequence_id="c")
    [line] = log(tmp_path, "generate")
    assert (line["event"], line["sequence_id"], line["where"]) == ("row rejected", "b", str(tmp_path))


def test_the_table_of_events_is_complete() -> None:
    """Against the events that the code names: what stands in quotes behind `event(` and `_note(`, and in `_EVENTS`."""
    repository = Path(__file__).resolve().parents[2]
    source = "".join(path.read_text() for path in sorted((repository / "eagle3_ray").rglob("*.py")))
    calls = re.findall(r'(?:run_log\.event|self\._note)\("([a-z ]+)"(?: if [^"]*"([a-z ]+)")?', source)
    named = {name for call in calls for name in call if name}
    kept = {name for table in re.findall(r"_EVENTS = \{(.*?)\}", source) for name in re.findall(r': "(.*?)"', table)}
    rows = [line.split("|")[1] for line in (repository / "docs" / "logs.md").read_text().splitlines() if "|" in line]
    documented = {name for row in rows for name in re.findall(r"`([a-z ]+)`", row)}
    statuses = {f"job {status}" for status in ("stopped", "incomplete", "damaged", "refused", "failed")}
    assert len(named | kept) > 10
    assert named | kept | statuses | {"warning"} == documented  # a warning of another kind than those of _EVENTS
