"""Kills at random moments of a training: every step is done once, with the loss that it has without a kill."""

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.train_log import read_log
from tests.forks import Job
from tests.jobs import Jobs, kill_one_of, left_by_killed_writers, processes_of, wait_until
from tests.ray.test_train_job import curve, words
from tests.writing_model import make_tiny_run

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "4"))
KILLS_OF_A_RUN = 4
PROCESSES = {"worker": "TrainWorker", "target": "StreamCapturer"}


@pytest.mark.timeout(300 + 90 * ROUNDS)
def test_no_kill_changes_the_loss_curve(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The driver, a training worker, the target that feeds it, or SIGTERM, ROUNDS times, four in a run."""
    dice = random.Random(4)
    kinds = ["driver", "SIGTERM", *PROCESSES] * (ROUNDS // KILLS_OF_A_RUN)
    dice.shuffle(kinds)
    calm = make_tiny_run(tmp_path / "calm", model, sequences)
    assert cluster.run(*words(calm, model), job="train").code == 0
    for first in range(0, ROUNDS, KILLS_OF_A_RUN):
        run = make_tiny_run(tmp_path / f"run{first}", model, sequences)
        job = cluster.start(*words(run, model), job="train")
        for kind in kinds[first : first + KILLS_OF_A_RUN]:
            wait_for_steps(run, dice.randint(1, 5), job)
            if kind in PROCESSES:
                kill_one_of(partial(processes_of, PROCESSES[kind]), dice)
            else:
                job.send_signal(signal.SIGKILL if kind == "driver" else signal.SIGTERM)
                job.communicate(timeout=90)
                job = cluster.start(*words(run, model), job="train")
        _, stderr = job.communicate(timeout=300)
        assert job.returncode == 0, stderr
        assert curve(run) == curve(calm)
        assert left_by_killed_writers(run) == []


def wait_for_steps(run: Path, count: int, job: Job) -> None:
    """Until so many more are logged, steps that are done again included."""
    goal = lines(run) + count
    wait_until(lambda: lines(run) >= goal, job, within_s=150)


def lines(run: Path) -> int:
    return len(read_log(run / "train" / "steps.jsonl"))
