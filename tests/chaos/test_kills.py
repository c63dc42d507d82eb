"""Kills at random moments: whatever dies, the same command completes the run and asks twice for what was in flight."""

import collections
import os
import random
import signal
from pathlib import Path

from tests.fakes.sglang_server import FakeServer
from tests.forks import Job
from tests.jobs import (
    Jobs,
    assert_sound,
    fake_server,
    kill_one_of,
    processes_of,
    row_requests,
    rows,
    sequence_of,
    settings,
    wait_until,
    write_prompts,
)

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "8"))
PROMPTS = 90 * ROUNDS
IN_FLIGHT = 24


def test_no_kill_loses_or_doubles_a_row(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    """One run, killed ROUNDS times: its driver, its generating actor, one of its two servers, or by SIGTERM."""
    dice = random.Random(20)
    prompts, run = write_prompts(tmp_path / "p.jsonl", PROMPTS), tmp_path / "run"
    slow = {"base_latency_s": 0.4, "max_running": 12}
    with fake_server(target, **slow) as one, fake_server(target, **slow) as other:
        words = [*settings(run, target, prompts, one.url, other.url), f"generate.max_in_flight={IN_FLIGHT}"]
        kinds = ["driver", "actor", "server", "SIGTERM"] * (ROUNDS // 4)
        dice.shuffle(kinds)
        killed: collections.Counter[str] = collections.Counter()
        job = cluster.start(*words)
        for kind in kinds:
            wait_until_generating(job, one, other, answers=dice.randint(5, 60))
            if kind == "driver":
                job.kill()
            elif kind == "SIGTERM":
                job.send_signal(signal.SIGTERM)
            elif kind == "actor":
                kill_one_of(lambda: processes_of("MapBatches(Generator)"), dice)
            else:
                dice.choice([one, other]).restart()
            killed[kind] += 1
            if kind in ("driver", "SIGTERM"):
                _, stderr = job.communicate(timeout=60)
                assert job.returncode != 0, stderr
                job = cluster.start(*words)
        _, stderr = job.communicate(timeout=300)
        for _ in range(2):  # rows of a server that died too often wait for another run of the same command
            if job.returncode == 0:
                break
            job = cluster.start(*words)
            _, stderr = job.communicate(timeout=300)
        requests = row_requests(one, other)
    assert job.returncode == 0, stderr
    stored = rows(run, "sequences") + rows(run, "rejected")  # the stand-in gives an empty answer now and then
    assert sorted(row["prompt_id"] for row in stored) == sorted(f"p{i}" for i in range(PROMPTS))
    assert_sound(run)
    assert sum(killed.values()) == len(kinds)
    repeated = len(requests) - len({sequence_of(request) for request in requests})
    assert repeated <= IN_FLIGHT * len(kinds)


def wait_until_generating(job: Job, *servers: FakeServer, answers: int) -> None:
    """Returns when the job has sent that many requests more; fails when it ends before."""
    goal = len(row_requests(*servers)) + answers
    wait_until(lambda: len(row_requests(*servers)) >= goal, job, within_s=90)
