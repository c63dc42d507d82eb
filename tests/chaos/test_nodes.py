"""Kills at random on a cluster of several nodes: whatever dies, the run completes, and every GPU is free at the end."""

import os
import random
from pathlib import Path

import pytest

from tests.forks import Job
from tests.jobs import assert_sound, kill_one_of, rows, settings, wait_until, write_prompts
from tests.nodes import Nodes, launch, requests_at, servers_of

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "4"))
PROMPTS = 120 * ROUNDS


@pytest.mark.timeout(300 + 90 * ROUNDS)
def test_no_loss_of_a_node_a_server_the_registry_or_the_driver_loses_or_doubles_a_row(
    target: Path, tmp_path: Path
) -> None:
    dice = random.Random(6)
    run, folder = tmp_path / "run", tmp_path / "servers"
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS)
    command = launch(folder, target, base_latency_s=1.0, max_running=5)
    words = [word for word in settings(run, target, prompts) if "endpoints" not in word]
    words += [f"target.launch={command}", "generate.servers=auto", "generate.gpus_per_server=8"]
    kinds = ["node", "server", "registry", "driver"] * (ROUNDS // 4)
    dice.shuffle(kinds)
    with Nodes() as nodes:
        living = [nodes.add(num_gpus=8), nodes.add(num_gpus=8)]
        job = nodes.jobs.start(*words)
        for kind in kinds:
            wait_for_answers(job, folder, dice.randint(5, 40))
            if kind == "node":
                nodes.remove(living.pop(dice.randrange(len(living))))
                living.append(nodes.add(num_gpus=8))
            elif kind == "driver":
                job.kill()
                job.communicate(timeout=60)
                job = nodes.jobs.start(*words)
            else:
                victims = (lambda: servers_of(folder)) if kind == "server" else (lambda: nodes.actors("Registry"))
                kill_one_of(victims, dice)
        for _ in range(3):  # rows of servers that died too often wait for another run of the same command
            _, stderr = job.communicate(timeout=400)
            if job.returncode == 0:
                break
            job = nodes.jobs.start(*words)
        assert job.returncode == 0, stderr
        nodes.wait_for_free_gpus()
        assert servers_of(folder) == []
    stored = rows(run, "sequences") + rows(run, "rejected")  # the stand-in gives an empty answer now and then
    assert sorted(row["prompt_id"] for row in stored) == sorted(f"p{i}" for i in range(PROMPTS))
    assert_sound(run)


def wait_for_answers(job: Job, folder: Path, answers: int) -> None:
    """Returns when the servers have given so many answers more; fails when the job ends before."""

    def count() -> int:
        return sum(map(len, requests_at(folder).values()))

    goal = count() + answers
    wait_until(lambda: count() >= goal, job, within_s=200)
