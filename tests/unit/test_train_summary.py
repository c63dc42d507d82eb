"""What the train stage makes of its log."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_ray import checkpoints, train, train_numbers
from eagle3_ray.runs import RunDir, write_json
from eagle3_ray.train_log import Watch


def settings_of(folder: Path, damaged: Sequence[str] = ()) -> Any:
    """Of a training of 100 sequences, three times."""
    write_json(folder / "corpus" / "corpus.json", {"damaged": list(damaged)})
    section = SimpleNamespace(epochs=3)
    sequences = SimpleNamespace(folder=folder / "corpus")
    return SimpleNamespace(folder=folder, plan="p", corpus=sequences, train_rows=tuple(range(100)), train=section)


def test_a_resumed_training_counts_its_own_seconds_and_the_tokens_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()

    def step(number: int, line: int) -> dict[str, Any]:
        """A step that took 2 s, a quarter of them waiting."""
        speed = {"tokens": 100, "tokens_per_second": 50.0, "wait_share": 0.25, "set_aside": 0, "step_accuracies": [0.5]}
        return {"step": number, "of": 9, "line": line, "loss": 1.0, **speed}

    numbers = {"chain_acceptance_length": 1.2, "loss": 1.0, "partitions": {}}
    check = {"step": 3, "line": 12, "validation": numbers}
    log = folder / train.LOG
    log.write_text(json.dumps(step(1, 4)) + "\n")  # by an earlier job, whose later lines were cut off
    watch = Watch(log)
    lines = [step(1, 4), step(2, 10), step(3, 11), check, step(4, 13)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch._tell()
    settings = settings_of(folder)
    target: Any = None  # nothing is exported from a training that is not finished
    summary = train._summarise(RunDir(tmp_path), settings, target, watch, "SIGTERM", time.monotonic() - 20)
    assert (summary["status"], summary["tokens"], summary["tokens_per_second"]) == ("stopped", 400, 50.0)
    assert summary["wall_s"] == 20.0
    assert abs(summary["start_up_s"] - 14) < 0.2  # the three steps took 6 s, and this job began 20 s ago
    assert summary["busy_s"] == 4.5


def summary_of(folder: Path, lines: list[dict[str, Any]], damaged: Sequence[str] = ()) -> dict[str, Any]:
    log = folder / train.LOG
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target: Any = None
    watch = Watch(log)
    return train._summarise(RunDir(folder.parent), settings_of(folder, damaged), target, watch, "SIGTERM", 0.0)


def step_with(set_aside: int) -> dict[str, Any]:
    speed = {"tokens": 100, "tokens_per_second": 50.0, "wait_share": 0.0, "step_accuracies": [0.5]}
    return {"step": 1, "of": 30, "line": 1, "loss": 1.0, "set_aside": set_aside, **speed}


def test_what_was_generated_and_is_not_trained_on_is_said_whatever_feeds_the_training(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    assert summary_of(folder, [step_with(0)])["warnings"] == []
    [damaged, set_aside] = summary_of(folder, [step_with(6)], damaged=["abc"])["warnings"]
    assert damaged == "1 generated sequences are damaged and were left out, e.g. abc"
    assert set_aside.startswith("60.0% of the sequences are not the target's own")  # 6 of 10 in one of 30 steps


def test_the_acceptance_length_is_that_of_the_checkpoint_that_stands_in_for_a_damaged_best_one(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    lines = [step_with(0)]
    for step, length in ((4, 2.9), (8, 2.3)):
        numbers = {"chain_acceptance_length": length, "loss": 1.0, "partitions": {}}
        lines.append({"step": step, "line": step, "validation": numbers})
        checkpoints.save(folder / "checkpoints", step, "p", {"x": torch.ones(1)}, best=step == 4)
    whole = summary_of(folder, lines)
    assert (whole["chain_acceptance_length"], whole["warnings"]) == (2.9, [])
    (folder / "checkpoints" / "00000004" / "state.pt").write_bytes(b"torn")
    summary = summary_of(folder, lines)
    assert summary["chain_acceptance_length"] == 2.3
    assert summary["warnings"] == ["the best checkpoint is damaged or gone; the last one, of step 8, stands in"]


def test_the_loss_is_of_what_was_trained_on_and_no_better_for_what_was_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences of 2 prompt and 3 answer tokens, of which one is set aside; each position has a loss of 2 nats."""
    monkeypatch.setattr(train_numbers, "sum_over_workers", lambda values, _: values)
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0]).bool()
    batch = SimpleNamespace(input_ids=torch.zeros(10), cu_seqlens=torch.tensor([0, 5, 10]), loss_mask=mask)
    one = torch.tensor([6.0])
    played: Any = SimpleNamespace(
        step_loss_sums=one, step_correct=torch.tensor([1.0]), step_counts=torch.tensor([3.0]), loss=one.sum()
    )
    fed: Any = SimpleNamespace(batch=batch, set_aside=1)
    totals = train_numbers.Totals(ttt_steps=1)
    totals.add(played, fed, waited=0.0, weight=1.0)
    numbers = totals.reduced(torch.device("cpu"), world=1)
    assert (numbers["loss"], numbers["step_losses"], numbers["set_aside"], numbers["tokens"]) == (2.0, [2.0], 1, 10)
