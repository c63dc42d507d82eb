"""Seconds from the start of each job to its first useful work, and its driver's peak memory (RSS) until then.

    python benchmarks/start_up.py [--rounds 3] [--jobs generate,train]

On a Ray cluster that runs already, with a model of 8 tiny layers, so that what is measured is not the model. First
useful work is the first request for a row (generate, pipeline) or for an answer (evaluate), the first shard of states
(capture), the first optimiser step (train); the others are short and count to their end. Baseline: a bare Ray driver
until the result of its first task. Prints one JSON line with the medians of the rounds.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.local_cluster import ray_cluster, ray_environment, say  # noqa: E402
from eagle3_ray.train_log import read_log  # noqa: E402
from tests.fakes.sglang_server import FakeServer  # noqa: E402
from tests.jobs import fake_server, row_requests, settings, write_prompts  # noqa: E402
from tests.writing_model import make_tiny_model, make_tiny_run, written_by  # noqa: E402

LIMIT_S = 300
BARE_DRIVER = "import ray; ray.init(logging_level='error'); ray.get(ray.remote(lambda: 1).remote())"
NO_SPECULATION = dict.fromkeys(
    f"speculative_{name}" for name in ("algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens")
)


@dataclass(frozen=True)
class Job:
    """A command, and the time of its first useful work since a time; one that only ends has none before that."""

    name: str
    command: list[str]
    first_work: Callable[[float], float | None] = lambda _: None
    codes: tuple[int, ...] = (0,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", help="names of the jobs to start, with commas between them (all)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster ends with us
    seconds: dict[str, list[float]] = {}
    megabytes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="e3r") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        rows = written_by(model, 60)
        options = {"model_path": str(model), "server_info": NO_SPECULATION}
        with ray_cluster(folder / "ray") as address, fake_server(model, **options) as server:
            for number in range(arguments.rounds):
                for job in jobs(folder / str(number), model, rows, server):
                    if arguments.jobs is None or job.name in arguments.jobs.split(","):
                        took, peak = start(job, ray_environment() | {"RAY_ADDRESS": address})
                        say(f"{job.name}: {took:.1f} s, {peak:.0f} MB")
                        seconds.setdefault(job.name, []).append(took)
                        megabytes.setdefault(job.name, []).append(peak)
    figures = {f"{name}_s": round(statistics.median(values), 2) for name, values in seconds.items()}
    figures |= {f"{name}_mb": round(statistics.median(values)) for name, values in megabytes.items()}
    print(json.dumps({"benchmark": "start_up", **figures}))


def jobs(folder: Path, model: Path, rows: list[dict[str, Any]], server: FakeServer) -> list[Job]:
    """Each with a run of its own."""
    prompts = write_prompts(folder / "prompts" / "p.jsonl", 20)
    runs = {name: make_tiny_run(folder / name, model, rows) for name in ("capture", "train", "report")}
    log, shards = runs["train"] / "train" / "steps.jsonl", runs["capture"] / "capture" / "shards"
    drafter = folder / "no-drafter"
    engines = f"none={server.url},{drafter}={server.url}"

    def request(since: float) -> float | None:
        return next((float(one["start"]) for one in row_requests(server) if one["start"] > since), None)

    def shard(_: float) -> float | None:
        return min((path.stat().st_mtime for path in shards.glob("*.parquet")), default=None)

    def step(_: float) -> float | None:
        return next((float(line["time"]) for line in read_log(log)), None)

    def captured(name: str) -> list[str]:
        return [f"run.dir={runs[name]}", f"target.model={model}", "generate.temperature=0", "train.heldout=0.1"]

    asking = ["smollm2-cpu", f"evaluate.prompts={prompts}", f"evaluate.drafters={drafter}"]
    return [
        Job("bare_ray_driver", ["-c", BARE_DRIVER]),
        Job("prepare", ["jobs/prepare.py", str(folder / "prepared"), "--source", f"p={prompts}"]),
        Job("generate", _job("generate", *settings(folder / "generate", model, prompts, server.url)), request),
        Job("capture", _job("capture", *captured("capture")), shard),
        Job("train", _job("train", *captured("train"), "train.feed=stream", "capture.cpus_per_target=0.5"), step),
        Job(
            "evaluate",
            ["jobs/evaluate.py", *asking, f"evaluate.endpoints={engines}", *captured("report")],
            request,
        ),
        Job("pipeline", _job("pipeline", *settings(folder / "pipeline", model, prompts, server.url)), request),
        Job("report", ["jobs/report.py", str(runs["report"])]),
        Job("doctor", ["jobs/doctor.py"], codes=(0, 1)),  # a cluster without a token is a finding
    ]


def _job(name: str, *words: str) -> list[str]:
    return [f"jobs/{name}.py", "smollm2-cpu", *words]


def start(job: Job, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds to the job's first useful work, and megabytes at their most until then. Ends the job there."""
    with tempfile.TemporaryFile("w+") as log:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, *job.command], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=log
        )
        peak, first = 0.0, None
        while first is None and process.poll() is None and time.time() < began + LIMIT_S:
            peak = max(peak, _peak_megabytes(process.pid))
            time.sleep(0.02)
            first = job.first_work(began)
        if first is None and process.returncode not in job.codes:
            process.kill()
            log.seek(0)
            raise SystemExit(f"{job.name} did no work (exit code {process.wait()}):\n{log.read()[-3000:]}")
        took = (first or time.time()) - began
        process.terminate()
        process.wait(LIMIT_S)
    return took, peak


def _peak_megabytes(pid: int) -> float:
    """The most that the process had in memory since it started its program; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
