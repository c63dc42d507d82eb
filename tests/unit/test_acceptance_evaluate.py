"""The evaluate stage against stand-in servers: what it reports, and what it keeps when an engine fails."""

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eagle3_ray import evaluate as stage
from eagle3_ray import pipeline
from eagle3_ray.acceptance import engine
from eagle3_ray.acceptance.kept import Kept
from eagle3_ray.acceptance.serving import Serving
from eagle3_ray.config import Config, ConfigError, Evaluate, Target
from eagle3_ray.evaluate import EvaluateSettings, dry_run, evaluate, run, settings_of
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.runs import RunDir, RunError
from tests.fakes.sglang_server import FakeServer
from tests.tiny_target import IM_END, VOCAB_SIZE

SPECULATION = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/runs/drafter",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
FAKE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_id": IM_END, "bos_id": 0, "mean_tokens": 1000}


@pytest.fixture(scope="module")
def plain() -> Iterator[FakeServer]:
    with FakeServer(**FAKE, server_info=dict.fromkeys(SPECULATION)) as server:
        yield server


@pytest.fixture(scope="module")
def drafted() -> Iterator[FakeServer]:
    """Says that every other token is a draft that was accepted."""
    with FakeServer(**FAKE, server_info=SPECULATION, faults={"speculative": 1.0}) as server:
        yield server


@pytest.fixture
def settings(
    plain: FakeServer, drafted: FakeServer, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> EvaluateSettings:
    monkeypatch.setattr(engine, "_WAIT_S", 0.0)
    (tmp_path / "mt.jsonl").write_text(json.dumps({"id": "m", "category": "math", "turns": ["What?", "Why?"]}) + "\n")
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps({"prompt": f"{n} and 1?"}) + "\n" for n in range(4)))
    section = Evaluate(
        drafters=["/runs/drafter"],
        prompts=[str(tmp_path / "mt.jsonl"), str(tmp_path / "gsm.jsonl")],
        max_new_tokens=11,
        steps=3,
        concurrencies=[1, 2],
        speed_prompts=2,
        endpoints=[f"none={plain.url}", f"/runs/drafter={drafted.url}"],
    )
    endpoints = (("none", plain.url), ("/runs/drafter", drafted.url))
    return EvaluateSettings(section, Target(model=str(target), served_as="fake/model"), endpoints=endpoints)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "measured")


def with_section(settings: EvaluateSettings, **fields: Any) -> EvaluateSettings:
    return replace(settings, section=settings.section.model_copy(update=fields))


def test_a_drafter_is_measured_beside_none_on_the_same_prompts(settings: EvaluateSettings, kept: Kept) -> None:
    summary = evaluate(settings, kept)
    assert (summary["stage"], summary["status"], summary["warnings"]) == ("evaluate", "complete", [])
    assert list(summary["engines"]) == ["none", "/runs/drafter"]
    result = summary["engines"]["/runs/drafter"]
    # the stand-in counts 6 verify steps and 5 accepted drafts in an answer of 11 tokens
    assert result["acceptance"]["all"] == {
        "acceptance_length": round(10 / 6, 4),
        "answers": 6,
        "tokens": 60,
        "verify_steps": 36,
        "histogram": [6, 30],
    }
    assert {name: group["answers"] for name, group in result["acceptance"].items()} == {
        "all": 6, "without loops": 6, "mt": 2, "mt/math": 2, "gsm": 4,
    }  # fmt: skip
    assert result["lossless"] == {"answers": 6, "equal": 6, "unexplained": 0, "mismatches": []}
    assert summary["acceptance_length"] == round(10 / 6, 4)
    assert summary["best_drafter"] == "/runs/drafter"
    assert summary["settings"]["max_new_tokens"] == 11
    assert "api_key" not in summary["settings"]
    assert json.dumps(summary), "all of it is JSON"


def test_the_start_of_an_engine_counts_as_start_up(
    settings: EvaluateSettings, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Serving.engine

    @contextmanager
    def slow(serving: Serving, drafter: str) -> Iterator[str]:
        time.sleep(0.3)
        with real(serving, drafter) as url:
            yield url

    monkeypatch.setattr(Serving, "engine", slow)
    summary = evaluate(settings, kept)
    assert 0.6 <= summary["start_up_s"] <= summary["wall_s"]
    assert summary["busy_s"] <= summary["wall_s"] - summary["start_up_s"] + 0.1  # each is rounded


def test_another_answer_than_the_plain_engines_is_a_warning(
    settings: EvaluateSettings, kept: Kept, drafted: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_ray.acceptance.lossless.token_gap", lambda *_: 3.0)
    drafted.set(model_seed=1)
    try:
        summary = evaluate(settings, kept)
    finally:
        drafted.set(model_seed=0)
    assert summary["engines"]["/runs/drafter"]["lossless"]["unexplained"] == 6
    assert "6 of 6 greedy answers differ from the plain engine's" in summary["warnings"][0]


def test_what_was_measured_before_an_engine_failed_is_kept(settings: EvaluateSettings, kept: Kept) -> None:
    two = replace(
        with_section(settings, drafters=["/runs/drafter", "/runs/other"]),
        endpoints=(*settings.endpoints, ("/runs/other", "http://127.0.0.1:9")),
    )
    summary = evaluate(two, kept)
    assert summary["status"] == "stopped"
    assert "http://127.0.0.1:9 does not answer /server_info" in summary["stopped_by"]
    assert list(summary["engines"]) == ["none", "/runs/drafter"]


def test_the_next_job_measures_only_the_engines_that_are_missing(
    settings: EvaluateSettings, kept: Kept, drafted: FakeServer, plain: FakeServer, tmp_path: Path
) -> None:
    two = with_section(settings, drafters=["/runs/drafter", "/runs/other"])
    down = (*settings.endpoints, ("/runs/other", "http://127.0.0.1:9"))
    first = evaluate(replace(two, endpoints=down), kept)
    assert (first["status"], list(first["engines"])) == ("stopped", ["none", "/runs/drafter"])
    before = [len(server.requests()) for server in (plain, drafted)]
    second = evaluate(replace(two, endpoints=(*settings.endpoints, ("/runs/other", drafted.url))), kept)
    assert second["status"] == "complete"
    assert {name: second["engines"][name] for name in first["engines"]} == first["engines"]
    assert second["engines"]["/runs/other"]["lossless"]["equal"] == 6
    asked = [len(server.requests()) - count for server, count in zip((plain, drafted), before, strict=True)]
    assert asked == [0, 6 + 2 * 2]  # the other drafter's 6 prompts, and 2 for each speed
    (tmp_path / "gsm.jsonl").write_text('{"prompt": "another question?"}\n')
    assert evaluate(settings, kept)["engines"]["none"]["answers"] == 3


@pytest.mark.parametrize("changed", ["config.json", "pytorch_model.bin", "model.safetensors"])
def test_a_drafter_that_changed_is_measured_again(
    settings: EvaluateSettings, kept: Kept, drafted: FakeServer, tmp_path: Path, changed: str
) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "pytorch_model.bin", "model.safetensors", "README.md"):
        (folder / name).write_text("{}")
    one = with_section(settings, drafters=[str(folder)])
    one = replace(one, endpoints=(settings.endpoints[0], (str(folder), drafted.url)))
    asked = [len(drafted.requests())]
    for name in ("README.md", changed):
        evaluate(one, kept)
        asked.append(len(drafted.requests()))
        (folder / name).write_text('{"other": 1}')
    evaluate(one, kept)
    asked.append(len(drafted.requests()))
    assert [later - earlier for earlier, later in itertools.pairwise(asked)] == [6 + 2 * 2, 0, 6 + 2 * 2]


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_a_damaged_measurement_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    (tmp_path / "k.json").write_text(damage)
    with pytest.raises(RunError, match=r"k\.json is damaged .*Remove it; the next job measures that engine again"):
        Kept(tmp_path).get("none", "k", pytest.fail)


def test_an_engine_of_another_model_is_refused_whatever_it_would_answer(settings: EvaluateSettings, kept: Kept) -> None:
    other = replace(settings, target=settings.target.model_copy(update={"served_as": "/models/previous-tune"}))
    summary = evaluate(other, kept)
    assert summary["status"] == "stopped"
    assert "serves 'fake/model', not '/models/previous-tune'" in summary["stopped_by"]
    assert summary["engines"] == {}


def test_an_engine_that_was_started_wrongly_is_measured_again_when_it_is_right(
    config: Config, drafted: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted.set(server_info={**SPECULATION, "speculative_algorithm": "EAGLE"})
    try:
        wrong = run(config)
    finally:
        drafted.set(server_info=SPECULATION)
    assert [finding["cause"] for finding in wrong["engines"]["/runs/drafter"]["diagnosis"]] == ["algorithm"]
    right = run(config)
    assert right["engines"]["/runs/drafter"]["diagnosis"] == []
    monkeypatch.setattr(stage, "evaluate", pytest.fail)
    assert run(config)["engines"] == right["engines"]


def test_an_id_outside_the_vocabulary_reaches_no_engine(
    settings: EvaluateSettings, kept: Kept, plain: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"id": "x", "input_ids": [1, VOCAB_SIZE]}) + "\n")
    before = len(plain.requests())
    with pytest.raises(PromptSourceError, match=f"gsm/x: token id {VOCAB_SIZE} is outside the vocabulary"):
        evaluate(settings, kept)
    assert len(plain.requests()) == before


def test_a_question_file_without_rows_is_refused_before_any_engine_starts(
    settings: EvaluateSettings, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "engine_info", pytest.fail)
    (tmp_path / "gsm.jsonl").write_text("")
    with pytest.raises(PromptSourceError, match=r"gsm\.jsonl holds no rows"):
        evaluate(settings, kept)


def test_a_pipeline_reads_its_questions_before_it_spends_days_on_a_drafter(config: Config, tmp_path: Path) -> None:
    (tmp_path / "gsm.jsonl").unlink()
    with pytest.raises(PromptSourceError, match=r"gsm\.jsonl does not exist"):
        pipeline.run(config)
    assert not (tmp_path / "run" / "generate").exists()


@pytest.mark.parametrize("concurrencies", [[0], [1, 0], [-1], []])
def test_no_request_in_flight_measures_nothing(concurrencies: list[int]) -> None:
    with pytest.raises(ValidationError, match="concurrencies"):
        Evaluate.model_validate({"concurrencies": concurrencies})


def test_a_plain_engine_that_speculates_is_refused(settings: EvaluateSettings, kept: Kept, drafted: FakeServer) -> None:
    summary = evaluate(replace(settings, endpoints=(("none", drafted.url),)), kept)
    assert summary["status"] == "stopped"
    assert "was named as the engine without a drafter, but it runs EAGLE3" in summary["stopped_by"]
    assert summary["acceptance_length"] is None


def test_prompts_that_are_not_there_are_an_error_before_any_engine_starts(
    settings: EvaluateSettings, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "engine_info", pytest.fail)
    with pytest.raises(PromptSourceError, match="does not exist"):
        evaluate(with_section(settings, prompts=["/nowhere"]), kept)


@pytest.fixture
def config(settings: EvaluateSettings, tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "target": settings.target.model_dump(),
            "prompts": {"path": "unused"},
            "evaluate": settings.section.model_dump(),
        }
    )


def with_evaluate(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=fields)})


def test_the_stage_takes_its_settings_from_the_configuration(config: Config, settings: EvaluateSettings) -> None:
    assert settings_of(config) == settings
    assert dry_run(config) == (
        f"5 questions, 6 answers of at most 11 tokens from each engine: none ({dict(settings.endpoints)['none']}), "
        f"/runs/drafter ({dict(settings.endpoints)['/runs/drafter']})"
    )


def test_the_runs_own_drafters_are_measured_where_none_is_named(config: Config) -> None:
    with pytest.raises(ConfigError, match="has no drafter to evaluate"):
        settings_of(with_evaluate(config, drafters=[]))
    stage = RunDir(config.run.dir).stage("train")
    (stage / "initial").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no drafter to evaluate"):
        settings_of(with_evaluate(config, drafters=[], endpoints=[]))
    (stage / "drafter").mkdir()
    RunDir(config.run.dir).write_summary("train", {"chain_acceptance_length": 1.9})
    found = settings_of(with_evaluate(config, drafters=[], endpoints=[]))
    assert found.section.drafters == [str(stage / "initial"), str(stage / "drafter")]
    at_least = 1.0 + 0.9 * 3 / 5  # 1.9 was measured with chains of 5, here are chains of 3
    assert found.expected == ((str(stage / "initial"), 1.0), (str(stage / "drafter"), pytest.approx(at_least)))
    with pytest.raises(ConfigError, match=r"evaluate\.prompts names no questions"):
        dry_run(with_evaluate(config, prompts=[]))


def test_what_a_warm_start_began_from_is_expected_to_draft(config: Config) -> None:
    """At exactly 1.0 it is diagnosed, as a drafter that has learned nothing yet is not."""
    run_dir = RunDir(config.run.dir)
    for name in ("initial", "drafter"):
        (run_dir.stage("train") / name).mkdir(parents=True)
    run_dir.claim("train", {"train.drafter": "0123456789abcdef"}, {})
    assert settings_of(with_evaluate(config, drafters=[], endpoints=[])).expected == ()


def test_a_drafter_that_is_not_there_and_an_endpoint_of_nobody_are_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.drafters=/runs/drafter is no folder"):
        settings_of(with_evaluate(config, endpoints=[]))
    with pytest.raises(
        ConfigError, match=r"endpoints=/runs/draft=http://x: write DRAFTER=URL with one of none, /runs/"
    ):
        settings_of(with_evaluate(config, endpoints=["/runs/draft=http://x"]))


def test_a_run_that_was_evaluated_is_left_alone_until_its_settings_change(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(config)
    assert first["status"] == "complete"
    with monkeypatch.context() as patch:
        patch.setattr(stage, "evaluate", pytest.fail)
        assert run(config) == json.loads(json.dumps(first))
    assert run(with_evaluate(config, limit=1))["engines"]["none"]["answers"] == 3
