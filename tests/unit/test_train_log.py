"""The events of a training in the run's log: what the driver makes of the lines that workers write."""

import json
from pathlib import Path
from typing import Any

from eagle3_ray import run_log
from eagle3_ray.batches import Step
from eagle3_ray.train_log import LOG, StepLog, Watch

NUMBERS: dict[str, Any] = {
    "loss": 1.0, "tokens": 8, "tokens_per_second": 2.0, "step_accuracies": [0.5], "wait_share": 0.0, "set_aside": 0
}  # fmt: skip


def log_of(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "logs" / "train.jsonl").read_text().splitlines()]
    common = ("time", "run", "stage", "level", "event")
    return [(line["level"], line["event"], {k: v for k, v in line.items() if k not in common}) for line in lines]


def steps(log: StepLog, first: int, count: int, **more: Any) -> None:
    for number in range(first, first + count):
        log.step(Step(number, 0, ()), 9, NUMBERS | more)


def test_starts_checkpoints_and_what_is_set_aside_are_events_and_steps_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    earlier = StepLog(folder, "plan", 0)  # of another job: not told again
    steps(earlier, 0, 2)
    earlier.checkpoint(2, best=True)
    earlier.close()
    with run_log.writing(tmp_path, "train"), Watch(folder / LOG) as watch:
        log = StepLog(folder, "plan", 2)
        steps(log, 2, 2)
        steps(log, 4, 1, set_aside=3)
        log.checkpoint(5, best=False)
        watch._tell()
        log.close()
        again = StepLog(folder, "plan", 4)  # a worker was lost behind step 5, whose checkpoint was torn
        steps(again, 4, 1)
        again.close()
    assert log_of(tmp_path) == [
        ("INFO", "training started", {"step": 2}),
        ("WARNING", "sequences set aside", {"step": 5, "sequences": 3}),
        ("INFO", "checkpoint written", {"step": 5, "best": False}),
        ("WARNING", "training restarted", {"step": 4}),
    ]
