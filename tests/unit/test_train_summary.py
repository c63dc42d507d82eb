"""What the train stage makes of its log."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_ray import train
from eagle3_ray.runs import RunDir
from eagle3_ray.train_log import Watch


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
    settings: Any = SimpleNamespace(folder=folder, plan="p")
    target: Any = None  # nothing is exported from a training that is not finished
    summary = train._summarise(RunDir(tmp_path), settings, target, watch, "SIGTERM", time.monotonic() - 20)
    assert (summary["status"], summary["tokens"], summary["tokens_per_second"]) == ("stopped", 400, 50.0)
    assert summary["wall_s"] == 20.0
    assert abs(summary["start_up_s"] - 14) < 0.2  # the three steps took 6 s, and this job began 20 s ago
    assert summary["busy_s"] == 4.5
