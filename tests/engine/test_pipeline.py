"""The whole way in one job, with a real SGLang: prompts in, a drafter measured in the engine out."""

import json
from pathlib import Path

import pytest

from eagle3_ray import doctor
from eagle3_ray.runs import RunDir
from tests.jobs import Jobs


@pytest.mark.usefixtures("cpu_model")
def test_prompts_become_a_drafter_that_the_engine_serves_without_changing_an_answer(
    cluster: Jobs, tmp_path: Path
) -> None:
    prompts, questions, run = tmp_path / "prompts.jsonl", tmp_path / "questions.jsonl", tmp_path / "run"
    _write(prompts, [f"What is {i} plus {i + 3}?" for i in range(24)])
    _write(questions, [f"What is {i} plus {i + 7}?" for i in (31, 42, 53, 64)])
    words = [
        f"run.dir={run}",
        f"prompts.path={prompts}",
        f"evaluate.prompts={questions}",
        "generate.max_new_tokens=32",
        "train.epochs=12",
        "train.heldout=0.1",
        "train.step_tokens=2048",
        "evaluate.max_new_tokens=24",
        "evaluate.concurrencies=[2]",
        "evaluate.speed_prompts=2",
    ]
    result = cluster.run(*words, job="pipeline")
    assert result.code == 0, result.stderr
    evaluated = RunDir(run).summary("evaluate")
    assert evaluated is not None
    fresh, trained = (evaluated["engines"][str(run / "train" / name)] for name in ("initial", "drafter"))
    for engine in (fresh, trained):
        assert engine["lossless"]["equal"] == engine["lossless"]["answers"] == 4
    lengths = [engine["acceptance"]["all"]["acceptance_length"] for engine in (fresh, trained)]
    assert lengths[0] < 1.2
    assert lengths[1] > lengths[0] + 0.1
    page = (run / "report.html").read_text()
    assert f"{lengths[1]:.2f}" in page
    told = doctor.describe(RunDir(run))
    assert "capture: complete" in told
    assert f"acceptance_length {lengths[1]}" in told
    again = cluster.run(*words, job="pipeline")
    assert (again.code, again.summary["acceptance_length"]) == (0, result.summary["acceptance_length"])
    assert again.summary["wall_s"] < result.summary["wall_s"] / 3


def _write(path: Path, questions: list[str]) -> None:
    rows = ({"id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(questions))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
