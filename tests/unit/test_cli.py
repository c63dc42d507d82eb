"""The command line of every job: what it prints where, and its exit codes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.exceptions import RayTaskError

from eagle3_ray.cli import main
from eagle3_ray.config import Config, ConfigError, keys, load, presets
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.runs import FingerprintMismatch, RunBusy
from eagle3_ray.sglang.probe import Unfit
from eagle3_ray.target.files import TargetError

COMPLETE: dict[str, Any] = {"stage": "generate", "status": "complete", "stopped_by": None, "warnings": [], "rows": 3}


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: /runs/a}\ntarget: {model: /models/m}\nprompts: {path: /data}\n")
    return str(path)


def _never(config: Config) -> Any:
    raise AssertionError("must not be called")


def test_the_last_line_of_stdout_is_the_summary_and_the_exit_code_is_0(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run(config: Config) -> dict[str, Any]:
        print("something that a library prints")
        seen.append(config)
        return COMPLETE

    assert main("story", run, _never, [source, "generate.temperature=0.25", "prompts.limit=4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == COMPLETE
    assert seen == [load(source, ["generate.temperature=0.25", "prompts.limit=4"])]


@pytest.mark.parametrize("status", ["incomplete", "stopped", "damaged"])
def test_a_run_that_is_not_complete_exits_with_1_and_says_how_to_go_on(
    source: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {**COMPLETE, "status": status, "stopped_by": "SIGTERM", "warnings": ["slow server"]}
    assert main("story", lambda _: summary, _never, [source]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == summary
    assert "STOPPED: SIGTERM" in err
    assert "WARNING: slow server" in err
    assert "Run the same command again" in err


@pytest.mark.parametrize("kind", [ConfigError, PromptSourceError, TargetError, Unfit, RunBusy, FingerprintMismatch])
def test_a_setup_error_is_one_line_that_starts_with_its_name_and_the_exit_code_is_2(
    source: str, kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> dict[str, Any]:
        raise kind("do this instead")

    assert main("story", run, _never, [source]) == 2
    out, err = capsys.readouterr()
    cause = f"{kind.__name__}: do this instead"
    assert err == f"{cause}\n"
    assert json.loads(out) == {"status": "refused", "stopped_by": cause, "warnings": []}


def test_an_error_that_is_no_setup_error_is_told_and_propagates(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        main("story", lambda _: {"rows": 1 // 0}, _never, [source])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["status"], told["stopped_by"].partition(":")[0]) == ("failed", "ZeroDivisionError")


@pytest.mark.parametrize(
    ("error", "by"),
    [(OSError(28, "No space left"), "The disk is full (run.dir)"), (RayTaskError("f", "a\nb", KeyError()), "KeyError")],
)
def test_a_full_disk_or_a_lost_cluster_is_a_stop(
    error: Exception, by: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> dict[str, Any]:
        raise error

    assert main("story", run, _never, [source]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["status"] == "stopped"
    assert told["stopped_by"].startswith(by)


@pytest.mark.parametrize(("number", "by"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_before_the_stages_own_work_is_an_orderly_stop(
    number: int, by: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

    def run(config: Config) -> dict[str, Any]:
        signal.raise_signal(number)
        raise AssertionError("the signal did nothing")

    assert main("story", run, _never, [source]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"status": "stopped", "stopped_by": by, "warnings": []}
    assert f"STOPPED: {by}" in err


def test_a_signal_behind_the_stages_own_work_does_not_cost_the_summary(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.shutdown", lambda: signal.raise_signal(signal.SIGTERM))
    assert main("story", lambda _: COMPLETE, _never, [source]) == 0
    assert json.loads(capsys.readouterr().out) == COMPLETE


@pytest.mark.parametrize("override", ["generate.temprature=1", "generate.temperature=9", "temperature"])
def test_a_wrong_override_exits_with_2_before_anything_runs(
    source: str, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("story", _never, _never, [source, override]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: ")


@pytest.mark.parametrize("before", [True, False])
def test_dry_run_prints_the_resolved_configuration_and_the_plan_and_stops(
    source: str, before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [source, "prompts.limit=4"]
    arguments = ["--dry-run", *arguments] if before else [*arguments, "--dry-run"]
    assert main("story", _never, lambda config: f"{config.prompts.limit} rows planned", arguments) == 0
    out = capsys.readouterr().out
    config, plan = out.rsplit("\n\n", 1)
    assert yaml.safe_load(config) == load(source, ["prompts.limit=4"]).model_dump()
    assert plan == "4 rows planned\n"


def test_a_setup_error_of_the_dry_run_exits_with_2_too(source: str) -> None:
    def dry_run(config: Config) -> str:
        raise TargetError("no such model")

    assert main("story", _never, dry_run, [source, "--dry-run"]) == 2


def test_help_lists_every_key_with_meaning_and_default_and_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main("What the job is for.", _never, _never, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "What the job is for." in text
    assert "--dry-run" in text
    assert all(name in text for name in presets())
    lines = text.splitlines()
    for name, field in keys():
        place = next(i for i, line in enumerate(lines) if line.startswith(f"  {name} ("))
        assert lines[place + 1].strip() == field.description
    assert "  run.dir (required)" in lines
    assert "  generate.top_p (default 1.0)" in lines
    assert "  generate.endpoints (default [])" in lines
    assert "  prompts.limit (default None)" in lines


def test_no_argument_at_all_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as end:
        main("story", _never, _never, [])
    assert end.value.code == 2
