"""What the capture stage says of its data, counted without a cluster."""

import time
from pathlib import Path
from typing import Any, Literal

import pytest

from eagle3_ray import capture, corpus
from eagle3_ray.capture_plan import Plan, Shard
from eagle3_ray.config import Capture
from eagle3_ray.states_cache import write_scores
from eagle3_ray.target.files import resolve
from tests.runs import make_run, sequence
from tests.tiny_target import make_tiny_target


@pytest.mark.parametrize(
    ("engine", "states", "limit"),
    [
        ("float32", "float32", 0.001),
        ("bfloat16", "float32", 0.13),  # the engine's rounding is in the recorded values, whatever we capture in
        ("float32", "bfloat16", 0.13),
        ("bfloat16", "bfloat16", 0.13),
    ],
)
def test_the_summary_has_the_limit_that_is_used(
    tmp_path: Path, engine: str, states: Literal["float32", "bfloat16"], limit: float
) -> None:
    run = make_run(
        tmp_path / "run",
        [sequence("q", [1, 100], [101, 2], [-1.0, -1.0])],
        {"generate.temperature": 0.0, "engine.dtype": engine},
    )
    section, sequences = Capture(dtype=states), corpus.make(run)
    target = resolve(str(make_tiny_target(tmp_path / "target")))
    progress = capture.Progress(Plan.make(run, section, sequences, target))
    summary = capture._summarise(run, section, sequences, target, progress, None, time.monotonic())
    assert summary["limit"]["mean_difference"] == limit


def test_sequences_that_are_set_aside_for_one_cause_are_counted_as_one_kind(tmp_path: Path) -> None:
    reasons = [
        None,
        "log-probabilities differ from the recorded ones by 0.9 nats over 30 tokens, limit 0.001",
        "only 84.6% of a greedy answer are the target's first choice over 13 tokens, limit 99%",
        "log-probabilities differ from the recorded ones by 1.2e+01 nats over 7 tokens, limit 0.001",
    ]
    rows: list[dict[str, Any]] = [{"row": i, "sequence_id": f"s{i}", "reason": why} for i, why in enumerate(reasons)]
    write_scores(tmp_path / "0.parquet", rows)
    counts, _ = capture._scores(tmp_path, [Shard("0", (0, 1, 2, 3))])
    assert counts == {
        "log-probabilities differ from the recorded ones by N nats over N tokens, limit N": 2,
        "only N% of a greedy answer are the target's first choice over N tokens, limit N%": 1,
    }
