"""Kills at random moments of whole pipelines: the same command ends with every row, state and step once, and a figure.

The target is a real model in miniature; stand-in servers give its answers, computed beforehand.
"""

import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray import doctor
from eagle3_ray.drafter.export import validate
from eagle3_ray.runs import RunDir
from tests.forks import Job
from tests.jobs import kill_one_of, left_by_killed_writers, processes_of, rows, wait_until, write_prompts
from tests.nodes import Nodes, launch, servers_of
from tests.ray.test_capture_job import assert_states_are_the_models
from tests.ray.test_train_job import curve
from tests.writing_model import answer_all

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "8"))
KILLS_OF_A_RUN = 8
PROMPTS, QUESTIONS, ANSWER = 80, 12, 24
ACTORS = ("MapBatches(Generator)", "ShardCapturer", "TrainWorker", "ManagedServer")


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_no_kill_of_a_pipeline_loses_or_doubles_anything(model: Path, tmp_path: Path) -> None:
    """The driver, one of its actors, a server, or by SIGTERM, ROUNDS times, eight in a run; each run then completes."""
    dice = random.Random(11)
    kinds = ["driver", "SIGTERM", "actor", "server"] * (ROUNDS // 4)
    dice.shuffle(kinds)
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    questions = write_prompts(tmp_path / "questions.jsonl", QUESTIONS, start=1000)
    answers = tmp_path / "answers.jsonl"
    answer_all(model, [prompts, questions], ANSWER, answers)
    for first in range(0, ROUNDS, KILLS_OF_A_RUN):
        run, folder = tmp_path / f"run{first}", tmp_path / f"servers{first}"
        command = launch(folder, model, answers=str(answers), base_latency_s=0.3, max_running=4)
        with Nodes() as nodes:
            nodes.add(num_gpus=1)
            words = [*settings(run, model, prompts, questions), f"target.launch={command}"]
            job = nodes.jobs.start(*words, job="pipeline")
            for kind in kinds[first : first + KILLS_OF_A_RUN]:
                if not wait_for_files(job, run, dice.randint(1, 8)):
                    break
                if kind in ("driver", "SIGTERM"):
                    job.send_signal(signal.SIGKILL if kind == "driver" else signal.SIGTERM)
                    job.communicate(timeout=120)
                    job = nodes.jobs.start(*words, job="pipeline")
                else:
                    kill_one_of(partial(victims, kind, folder), dice, job)
            for _ in range(4):  # what died too often waits for another run of the same command
                stdout, stderr = job.communicate(timeout=600)
                if job.returncode == 0:
                    break
                job = nodes.jobs.start(*words, job="pipeline")
            assert job.returncode == 0, stderr
            nodes.wait_for_free_gpus()
            assert servers_of(folder) == []
        assert_whole(run, model, json.loads(stdout.splitlines()[-1]))
        shutil.rmtree(run)


def settings(run: Path, model: Path, prompts: Path, questions: Path) -> list[str]:
    return [
        f"run.dir={run}",
        f"target.model={model}",
        f"prompts.path={prompts}",
        f"evaluate.prompts={questions}",
        f"generate.max_new_tokens={ANSWER}",
        f"evaluate.max_new_tokens={ANSWER}",
        "evaluate.concurrencies=[4]",
        "evaluate.speed_prompts=4",
        "evaluate.gpus=1",
        "generate.gpus_per_server=1",
        "generate.temperature=0",
        "audit.loop_tokens=32",
        "capture.storage=fp32",
        "capture.shard_tokens=200",
        "capture.batch_tokens=128",
        "capture.cpus_per_target=0.5",
        "train.cpus_per_worker=1",
        "train.batch_tokens=128",
        "train.step_tokens=256",
        "train.epochs=4",
        "train.ttt_steps=3",
        "train.heldout=0.1",
        "train.validate_every=10",
        "train.checkpoint_every=3",
    ]


def assert_whole(run: Path, model: Path, summary: dict[str, Any]) -> None:
    """Every prompt has its answer once, every answer its states, every step its loss, every question its count."""
    stored, rejected = rows(run, "sequences"), rows(run, "rejected")
    assert sorted(row["prompt_id"] for row in stored + rejected) == sorted(f"p{i}" for i in range(PROMPTS))
    assert_states_are_the_models(run, model, len(stored))
    assert [step for step, _, _ in curve(run)] == list(range(1, summary["stages"]["train"]["steps"] + 1))
    validate(run / "train" / "drafter", json.loads((model / "config.json").read_text()))
    evaluated = RunDir(run).summary("evaluate")
    assert evaluated is not None
    for name in ("initial", "drafter"):
        lossless = evaluated["engines"][str(run / "train" / name)]["lossless"]
        assert lossless["equal"] == lossless["answers"] == QUESTIONS
    assert left_by_killed_writers(run) == []
    assert "evaluate: complete" in doctor.describe(RunDir(run))


def victims(kind: str, folder: Path) -> list[int]:
    """The servers where those are asked for and there are some, else the actors."""
    return (kind == "server" and servers_of(folder)) or [pid for name in ACTORS for pid in processes_of(name)]


def wait_for_files(job: Job, run: Path, count: int) -> bool:
    """Until the run has so many files more than now; False when the job ends before."""
    goal = files(run) + count
    wait_until(lambda: files(run) >= goal or job.poll() is not None, None, within_s=300)
    return job.poll() is None


def files(run: Path) -> int:
    return sum(1 for _ in run.rglob("*"))
