"""What the train stage makes of its log."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_ray import train
from eagle3_ray.runs import RunDir


def test_a_resumed_training_counts_its_own_seconds_and_the_tokens_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    now = time.time()

    def step(number: int, ago_s: float) -> dict[str, Any]:
        """A step that took 2 s, a quarter of them waiting."""
        speed = {"tokens": 100, "tokens_per_second": 50.0, "wait_share": 0.25, "set_aside": 0}
        return {"step": number, "of": 9, "time": now - ago_s, "loss": 1.0, **speed}

    check = {"step": 3, "time": now - 5.5, "validation": {"chain_acceptance_length": 1.2}}
    lines = [step(1, 500), step(2, 8), step(3, 6), check, step(4, 3)]  # the first one by an earlier job
    (folder / train.LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: Any = SimpleNamespace(folder=folder, plan="p")
    target: Any = None  # nothing is exported from a training that is not finished
    summary = train._summarise(RunDir(tmp_path), settings, target, "SIGTERM", time.monotonic() - 20)
    assert (summary["status"], summary["tokens"], summary["tokens_per_second"]) == ("stopped", 400, 50.0)
    assert summary["wall_s"] == 20.0
    assert abs(summary["start_up_s"] - 10) < 0.2  # 20 s ago until the start of step 2
    assert summary["busy_s"] == 4.5
