"""The evaluate stage against stand-in servers: what it reports, and what it keeps when an engine fails."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray import evaluate as stage
from eagle3_ray.acceptance import engine
from eagle3_ray.evaluate import EvaluateSettings, evaluate
from eagle3_ray.prompts import PromptSourceError
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
    return EvaluateSettings(
        target=str(target),
        drafters=("/runs/drafter",),
        prompts=(str(tmp_path / "mt.jsonl"), str(tmp_path / "gsm.jsonl")),
        max_new_tokens=11,
        steps=3,
        concurrencies=(1, 2),
        speed_prompts=2,
        endpoints=(("none", plain.url), ("/runs/drafter", drafted.url)),
        out=str(tmp_path / "evaluate.json"),
    )


def test_a_drafter_is_measured_beside_none_on_the_same_prompts(settings: EvaluateSettings) -> None:
    summary = evaluate(settings)
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
    assert json.loads(Path(settings.out or "").read_text()) == json.loads(json.dumps(summary))


def test_another_answer_than_the_plain_engines_is_a_warning(
    settings: EvaluateSettings, drafted: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_ray.acceptance.lossless.token_gap", lambda *_: 3.0)
    drafted.set(model_seed=1)
    try:
        summary = evaluate(settings)
    finally:
        drafted.set(model_seed=0)
    assert summary["engines"]["/runs/drafter"]["lossless"]["unexplained"] == 6
    assert "6 of 6 greedy answers differ from the plain engine's" in summary["warnings"][0]


def test_sampled_answers_are_not_compared(settings: EvaluateSettings) -> None:
    assert evaluate(replace(settings, temperature=0.7))["engines"]["/runs/drafter"]["lossless"] is None


def test_what_was_measured_before_an_engine_failed_is_kept(settings: EvaluateSettings) -> None:
    two = replace(
        settings,
        drafters=("/runs/drafter", "/runs/other"),
        endpoints=(*settings.endpoints, ("/runs/other", "http://127.0.0.1:9")),
    )
    summary = evaluate(two)
    assert summary["status"] == "stopped"
    assert "http://127.0.0.1:9 does not answer /server_info" in summary["stopped_by"]
    assert list(summary["engines"]) == ["none", "/runs/drafter"]


def test_a_plain_engine_that_speculates_is_refused(settings: EvaluateSettings, drafted: FakeServer) -> None:
    summary = evaluate(replace(settings, endpoints=(("none", drafted.url),)))
    assert summary["status"] == "stopped"
    assert "was named as the engine without a drafter, but it runs EAGLE3" in summary["stopped_by"]
    assert summary["acceptance_length"] is None


def test_prompts_that_are_not_there_are_an_error_before_any_engine_starts(
    settings: EvaluateSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "engine_info", pytest.fail)
    with pytest.raises(PromptSourceError, match="does not exist"):
        evaluate(replace(settings, prompts=("/nowhere",)))
