"""Kills at random moments of a capture: the cache ends with every sequence once, its states the model's own."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil

from eagle3_ray.target.sglang_server import SHARED_MEMORY
from tests.jobs import Jobs, kill_one_of, left_by_killed_writers, processes_of, wait_until
from tests.ray.test_capture_job import assert_states_are_the_models, shard_files, words
from tests.writing_model import make_tiny_run

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "8"))
KILLS_OF_A_RUN = 4
SEQUENCES = 60


def test_no_kill_loses_or_doubles_a_sequence(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The driver, the target's actor, or SIGTERM, ROUNDS times, four in a run; each run then completes."""
    dice = random.Random(3)
    victims = [dice.choice(["driver", "target", "SIGTERM"]) for _ in range(ROUNDS)]
    for first in range(0, ROUNDS, KILLS_OF_A_RUN):
        run = make_tiny_run(tmp_path / f"run{first}", model, sequences)
        command = [*words(run, model), "capture.shard_tokens=40"]
        job = cluster.start(*command, job="capture")
        for victim in victims[first : first + KILLS_OF_A_RUN]:
            wait_until(lambda: bool(_actors()), job, within_s=300)
            goal = len(shard_files(run)) + dice.randint(0, 5)
            wait_until(lambda goal=goal, run=run: len(shard_files(run)) >= goal, job, within_s=300)  # type: ignore[misc]
            if victim == "target":
                kill_one_of(_actors, dice)
            else:
                job.send_signal(signal.SIGKILL if victim == "driver" else signal.SIGTERM)
                job.communicate(timeout=60)
                job = cluster.start(*command, job="capture")
        _, stderr = job.communicate(timeout=200)
        assert job.returncode == 0, stderr
        assert_states_are_the_models(run, model, SEQUENCES)
        assert list((run / "capture" / "shards").glob(".*")) == []
        assert left_by_killed_writers(run) == []


def test_a_killed_engine_is_started_again_and_its_batch_is_captured_once(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The scheduler process of a real SGLang, several times in one job."""
    run = make_tiny_run(tmp_path / "run", model, sequences)
    job = cluster.start(*words(run, model), "capture.backend=sglang", "capture.shard_tokens=40", job="capture")
    killed: set[int] = set()
    kills = max(2, ROUNDS // 4)
    for _ in range(kills):
        wait_until(lambda: bool(_schedulers() - killed), job, within_s=300)
        goal = len(shard_files(run)) + 2
        wait_until(lambda goal=goal: len(shard_files(run)) >= goal, job, within_s=300)  # type: ignore[misc]
        [scheduler] = _schedulers() - killed
        os.kill(scheduler, signal.SIGKILL)
        killed.add(scheduler)
    _, stderr = job.communicate(timeout=400)
    assert job.returncode == 0, stderr
    assert stderr.count("The target is started again") == kills
    assert_states_are_the_models(run, model, SEQUENCES)
    assert [path for path in SHARED_MEMORY.glob("*/*") if path.name != "owner.lock"] == []


def _actors() -> list[int]:
    return processes_of("ShardCapturer")


def _schedulers() -> set[int]:
    """Of the servers that the capturing actor started."""
    ours = {child.pid for actor in _actors() for child in psutil.Process(actor).children(recursive=True)}
    return ours.intersection(processes_of("sglang::scheduler"))
