"""Runs jobs on a cluster the way that users do, and reads what they leave behind."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest

from tests.fakes.sglang_server import FakeServer, answer
from tests.forks import REPOSITORY, Job, preload_jobs
from tests.tiny_target import IM_END, VOCAB_SIZE

AnyJob = Job | subprocess.Popen[str]
MAX_NEW_TOKENS = 40


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        summary: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return summary


@dataclass(frozen=True)
class Jobs:
    """A cluster's addresses: of its GCS for drivers, of its dashboard for `ray job`."""

    gcs: str
    dashboard: str

    def __post_init__(self) -> None:
        preload_jobs()

    def start(self, *words: str | Path, job: str = "generate") -> Job:
        """Starts `python jobs/JOB.py smollm2-cpu ...` as a driver of the cluster."""
        return Job(f"jobs/{job}.py", ["smollm2-cpu", *map(str, words)], self.environment())

    def run(self, *words: str | Path, job: str = "generate") -> Result:
        """Runs the job to its end."""
        process = self.start(*words, job=job)
        stdout, stderr = process.communicate(timeout=900)
        assert process.returncode is not None
        return Result(process.returncode, stdout, stderr)

    def environment(self) -> dict[str, str]:
        """What a driver needs to find the cluster."""
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "RAY_ADDRESS": self.gcs, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": path}


def fake_server(target: Path, **options: Any) -> FakeServer:
    """A stand-in server of the tiny target; `options` are fields of fake_engine.Options."""
    return FakeServer(**{**tiny_options(target), "model_path": str(target), **options})


def tiny_options(target: Path) -> dict[str, Any]:
    """What makes a stand-in server one of the tiny target."""
    return {
        "tokenizer_dir": str(target),
        "vocab_size": VOCAB_SIZE,
        "eos_id": IM_END,
        "mean_tokens": 15.0,
        "context_length": 512,
        "max_total_tokens": 8192,
    }


def settings(run: Path, target: Path, prompts: Path, *urls: str) -> list[str]:
    """The overrides that every job of these tests has."""
    return [
        f"run.dir={run}",
        f"target.model={target}",
        f"prompts.path={prompts}",
        f"generate.endpoints={','.join(urls)}",
        f"generate.max_new_tokens={MAX_NEW_TOKENS}",
        "audit.loop_tokens=32",
    ]


def processes_of(name: str) -> list[int]:
    """The actors of that class on this machine, by the name that Ray gives their processes."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if name in " ".join(p.info["cmdline"] or ())]


def kill_one_of(processes: Callable[[], list[int]], dice: random.Random, job: AnyJob | None = None) -> None:
    """`kill -9` to one of them, as soon as there is one; one that ends by itself meanwhile does not count.

    Where `job` is given and ends before there is one, none is killed.
    """
    deadline = time.monotonic() + 60
    while job is None or job.poll() is None:
        assert time.monotonic() < deadline, "there is nothing to kill"
        with suppress(IndexError, ProcessLookupError):
            os.kill(dice.choice(processes()), signal.SIGKILL)
            return
        time.sleep(0.05)


def left_by_killed_writers(run: Path) -> list[Path]:
    """What was being written when its writer died, and is under its temporary name still."""
    return [path for path in run.rglob(".*") if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name)]


def write_prompts(path: Path, count: int, start: int = 0) -> Path:
    """`count` different one-message prompts as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": f"What is {i} plus {i * 7}?"}]})
        for i in range(start, start + count)
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def rows(run: Path, folder: str) -> list[dict[str, Any]]:
    """All rows of RUN/generate/rows/FOLDER."""
    place = run / "generate" / "rows" / folder
    return ds.dataset(place, format="parquet").to_table().to_pylist() if place.exists() else []  # type: ignore[no-any-return]


def expected_answer(prompt_ids: list[int]) -> tuple[list[int], str]:
    """What the stand-in server answers greedily, as output ids and finish reason."""
    ids, finish = answer(
        prompt_ids, vocab_size=VOCAB_SIZE, eos_id=IM_END, max_new_tokens=MAX_NEW_TOKENS, mean_tokens=15.0
    )
    return ids, finish["type"]


def assert_sound(run: Path) -> None:
    """Every stored answer is exactly what the server answers to its prompt, and no sequence id stands twice."""
    stored, rejected = rows(run, "sequences"), rows(run, "rejected")
    for row in stored + [row for row in rejected if row["output_ids"]]:
        assert (row["output_ids"], row["finish_reason"]) == expected_answer(row["prompt_ids"]), row["prompt_id"]
    ids = [row["sequence_id"] for row in stored + rejected]
    assert len(ids) == len(set(ids))


def assert_times_add_up(summary: dict[str, Any]) -> None:
    """A stage's seconds of starting up and of work are parts of its whole time, but for rounding to 0.1 s."""
    assert summary["start_up_s"] > 0
    assert 0 < summary["busy_s"] <= summary["wall_s"] - summary["start_up_s"] + 0.2


def row_requests(*servers: FakeServer) -> list[dict[str, Any]]:
    """The servers' requests for rows, without those of the probe, in the order of arrival."""
    found = [entry for server in servers for entry in server.requests() if not entry["rid"].startswith("probe")]
    return sorted(found, key=lambda entry: float(entry["start"]))


def sequence_of(request: dict[str, Any]) -> str:
    """The sequence id in a request id (`SEQUENCE-ATTEMPT-NONCE`)."""
    return str(request["rid"]).split("-")[0]


def wait_for_requests(server: FakeServer, count: int, job: AnyJob | None = None) -> None:
    """Returns when the server has seen that many requests for rows; fails when the job ends before."""
    wait_until(lambda: len(row_requests(server)) >= count, job, within_s=120)


def wait_until(reached: Callable[[], bool], job: AnyJob | None, within_s: float) -> None:
    """Returns when that is so; fails when the job ends before, or the time is over."""
    deadline = time.monotonic() + within_s
    while not reached():
        if job is not None and job.poll() is not None:
            pytest.fail(f"the job ended with {job.returncode}:\n{job.communicate()[1]}")
        assert time.monotonic() < deadline, f"it is not so after {within_s:g} s"
        time.sleep(0.02)
