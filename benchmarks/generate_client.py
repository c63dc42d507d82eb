"""How much of a plain asyncio script's rate the generate job reaches, against a server that only takes time.

Three clients send the same prompts, 150 in flight, one after the other: a plain script (`plain_client.py`), the fleet
by itself, and the whole job on a Ray cluster that runs already. Prints one JSON line:

first_to_last_ratio        the job's requests per second, first request to last answer / the plain script's (goal 0.97)
fleet_first_to_last_ratio  the same of the fleet without Ray
whole_job_ratio            the plain script's wall time / the job's, process start to end (goal 0.85 at a minute)

    python benchmarks/generate_client.py                # 5700 rows, about four minutes
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.local_cluster import ray_cluster, ray_environment, say  # noqa: E402
from eagle3_ray.sglang.fleet import Fleet  # noqa: E402
from eagle3_ray.sglang.probe import ProbeMaterial, probe  # noqa: E402
from eagle3_ray.sglang.protocol import Sampling  # noqa: E402
from eagle3_ray.sglang.transport import open_session  # noqa: E402
from tests.tiny_target import END_OF_TEXT, IM_END, VOCAB_SIZE, make_tiny_target  # noqa: E402

MAX_NEW_TOKENS = 200
BENCHMARKS = REPOSITORY / "benchmarks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5700, help="prompts; 5700 take about a minute each time")
    parser.add_argument("--in-flight", type=int, default=150, help="requests in flight")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    arguments = parser.parse_args()
    rows, in_flight = arguments.rows, arguments.in_flight
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    with tempfile.TemporaryDirectory(prefix="e3r") as name:
        folder = Path(name)
        model = make_tiny_target(folder / "tiny")
        prompts = write_prompts(folder / "prompts.jsonl", rows, arguments.prompt_tokens)
        with latency_server(model, max_running=in_flight) as url:
            plain_wall_s = run_plain(url, prompts, folder / "answers.jsonl", in_flight)
            plain = server_stats(url, rows)
            asyncio.run(run_fleet(url, prompts, model, in_flight))
            fleet = server_stats(url, rows)
            with ray_cluster(folder / "ray") as address:
                job_started, job_wall_s = run_job(address, url, prompts, model, folder / "run", in_flight)
            job = server_stats(url, rows)
    result = {
        "first_to_last_ratio": round(plain["first_to_last_s"] / job["first_to_last_s"], 4),
        "fleet_first_to_last_ratio": round(plain["first_to_last_s"] / fleet["first_to_last_s"], 4),
        "whole_job_ratio": round(plain_wall_s / job_wall_s, 4),
        "rows": rows,
        "in_flight": in_flight,
        "plain_requests_per_second": round(rows / plain["first_to_last_s"], 2),
        "plain_first_to_last_s": round(plain["first_to_last_s"], 2),
        "job_first_to_last_s": round(job["first_to_last_s"], 2),
        "plain_wall_s": round(plain_wall_s, 2),
        "job_wall_s": round(job_wall_s, 2),
        "job_before_first_request_s": round(job["first_request"] - job_started, 2),
        "job_after_last_answer_s": round(job_started + job_wall_s - job["last_answer"], 2),
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


def write_prompts(path: Path, rows: int, tokens: int) -> Path:
    """Ready ids, so that every client sends the same."""
    chance = random.Random(0)
    with path.open("w") as file:
        for row in range(rows):
            ids = chance.choices(range(10, 300), k=tokens)
            file.write(json.dumps({"id": f"row{row}", "input_ids": ids}) + "\n")
    return path


def server_stats(url: str, rows: int) -> dict[str, Any]:
    """What the server saw since the last look; its clock times all clients alike."""
    with urllib.request.urlopen(f"{url}/stats", timeout=10) as response:
        stats: dict[str, Any] = json.load(response)
    if stats["answers"] != rows:
        raise SystemExit(f"the server gave {stats['answers']} answers for {rows} rows")
    say(f"  {stats['first_to_last_s']:.2f} s from first request to last answer, {stats['most_in_flight']} in flight")
    return stats


# ---- the three clients


def run_plain(url: str, prompts: Path, answers: Path, in_flight: int) -> float:
    say("plain asyncio script ...")
    command = [sys.executable, str(BENCHMARKS / "plain_client.py"), url, str(prompts), str(answers)]
    started = time.monotonic()
    subprocess.run([*command, "--in-flight", str(in_flight)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


async def run_fleet(url: str, prompts: Path, model: Path, in_flight: int) -> None:
    say("fleet ...")
    sampling = Sampling(
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=0.7,
        top_p=1.0,
        logprobs=True,
        vocab_size=VOCAB_SIZE,
        stop_ids=frozenset({END_OF_TEXT, IM_END}),
    )
    from tokenizers import Tokenizer

    text = "What is the capital of France?"
    material = ProbeMaterial(
        model=str(model),
        served_as=None,
        architectures=(),
        text=text,
        text_ids=tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids),
        prompt_ids=(20, 21, 22),
        forced_ids=(IM_END,),
    )
    async with open_session(None, 60) as session:
        facts = await probe(session, url, material, sampling)
    fleet = Fleet(
        [facts],
        lambda: open_session(None, 60),
        material,
        sampling,
        max_in_flight=in_flight,
        share=1.0,
        attempts=2,
        outage_limit_s=60,
    )
    await fleet.start()
    rows = [json.loads(line) for line in prompts.open()]
    await asyncio.gather(*(fleet.generate(row["id"], row["input_ids"], 80) for row in rows))
    await fleet.close()


def run_job(address: str, url: str, prompts: Path, model: Path, run: Path, in_flight: int) -> tuple[float, float]:
    """When the job started (monotonic clock), and how long it took."""
    say("generate job ...")
    settings = {
        "run.dir": run,
        "target.model": model,
        "prompts.path": prompts,
        "generate.endpoints": url,
        "generate.max_in_flight": in_flight,
        "generate.max_new_tokens": MAX_NEW_TOKENS,
        "generate.temperature": 0.7,
    }
    command = [sys.executable, str(REPOSITORY / "jobs" / "generate.py"), "smollm2-cpu"]
    command += [f"{key}={value}" for key, value in settings.items()]
    environment = ray_environment() | {"RAY_ADDRESS": address}
    started = time.monotonic()
    job = subprocess.run(command, env=environment, capture_output=True, text=True)
    wall_s = time.monotonic() - started
    if job.returncode != 0:
        raise SystemExit(f"the job ended with {job.returncode}:\n{job.stdout[-2000:]}\n{job.stderr[-4000:]}")
    last = job.stdout.splitlines()[-1]
    if not last.startswith("{"):
        raise SystemExit(f"the job's last line is no JSON object:\n{job.stdout[-3000:]}")
    summary = json.loads(last)
    say(f"  the job's own summary: {summary['rows']} rows, {summary['wall_s']} s, warnings {summary.get('warnings')}")
    return started, wall_s


# ---- what runs beside them


@contextlib.contextmanager
def latency_server(model: Path, max_running: int) -> Iterator[str]:
    command = [sys.executable, str(BENCHMARKS / "latency_server.py"), "--model", str(model)]
    command += ["--max-running", str(max_running)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
