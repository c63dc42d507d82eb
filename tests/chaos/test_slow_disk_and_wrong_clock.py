"""Kills on a disk that answers late and beside a clock that jumps by days: every row once, and sane figures."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.runs import write_text
from tests.forks import REPOSITORY
from tests.jobs import (
    assert_sound,
    assert_times_add_up,
    fake_server,
    row_requests,
    rows,
    settings,
    wait_for_requests,
    write_prompts,
)
from tests.nodes import Nodes

ROUNDS = int(os.environ.get("EAGLE3_RAY_KILLS", "2"))
PROMPTS = 100 * ROUNDS
DAY_S = 86400
ERRATIC = REPOSITORY / "tests" / "erratic"


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_late_writes_and_a_clock_that_jumps_lose_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    run, clock, delay = tmp_path / "run", tmp_path / "clock", tmp_path / "delay"
    clock.write_text("0")
    delay.write_bytes(struct.pack("<q", 0))
    for name, value in {
        "LD_PRELOAD": slow_writes(tmp_path),
        "SLOW_WRITES_US_PER_KIB": delay,
        "SLOW_WRITES_BELOW": run,
        "CLOCK_AHEAD_S": clock,
        "PYTHONPATH": os.pathsep.join([str(ERRATIC), str(REPOSITORY)]),
    }.items():
        monkeypatch.setenv(name, str(value))
    with Nodes() as nodes, fake_server(target, base_latency_s=0.3, max_running=12) as server:
        words = settings(run, target, write_prompts(tmp_path / "p.jsonl", PROMPTS), server.url)
        job = start(nodes, words)
        for _ in range(ROUNDS):
            wait_for_requests(server, len(row_requests(server)) + dice.randint(5, 40), job)
            delay.write_bytes(struct.pack("<q", dice.choice([0, 1_000, 10_000])))  # down to 100 KiB/s
            write_text(clock, str(dice.choice([-DAY_S, 0, DAY_S])))
            job.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
            job.communicate(timeout=120)
            job = start(nodes, words)
        wait_for_requests(server, len(row_requests(server)) + 5, job)
        write_text(clock, str(2 * DAY_S))  # as behind a laptop's sleep; Ray Data waits for one that goes back
        stdout, stderr = job.communicate(timeout=400)
        assert job.returncode == 0, stderr
        assert_times_add_up(json.loads(stdout.splitlines()[-1]))
    stored = rows(run, "sequences") + rows(run, "rejected")
    assert sorted(row["prompt_id"] for row in stored) == sorted(f"p{i}" for i in range(PROMPTS))
    assert_sound(run)
    log = [json.loads(line) for line in (run / "logs" / "generate.jsonl").read_text().splitlines()]
    assert all(0 <= line["seconds"] < 600 for line in log if "seconds" in line)


def slow_writes(folder: Path) -> Path:
    """The library that makes writes late, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed (apt-get install gcc)")
    library = folder / "slow_writes.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, ERRATIC / "slow_writes.c"], check=True)
    return library


def start(nodes: Nodes, words: list[str]) -> subprocess.Popen[str]:
    """A process of its own, so that it is preloaded like the cluster's."""
    command = [sys.executable, "jobs/generate.py", "smollm2-cpu", *words]
    environment = {**nodes.jobs.environment(), "PYTHONPATH": os.environ["PYTHONPATH"]}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)
