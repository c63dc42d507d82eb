"""How a generate job's rate grows with the nodes of its cluster, where the servers are the limit.

A simulated cluster has 1, 2 and 4 nodes of 8 GPUs, which are only numbers; `generate.servers=auto` starts a stand-in
server on each that runs so many requests at once and takes the same time for every one. Then a job begins with one
node, and another one joins it. A rate is what the servers were sent in a second while all of them had work. One JSON
line:

ratio_to_linear    requests/s with n nodes / (n times the requests/s with one) (goal 0.95)
joined_ratio       requests/s after a node has joined a running job / (twice those before) (goal 0.95)
of_the_servers     requests/s with one node / what its server can do at most

    python benchmarks/scale.py                # four jobs, about six minutes
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.forks import Job  # noqa: E402
from tests.jobs import settings, write_prompts  # noqa: E402
from tests.nodes import Nodes, launch, requests_at  # noqa: E402
from tests.tiny_target import make_tiny_target  # noqa: E402

RUNNING, LATENCY_S = 8, 2.0
PER_SERVER = RUNNING / LATENCY_S
"""Requests a second that a server can do at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of each measurement")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="e3r") as name, Nodes() as nodes:
        folder = Path(name)
        target = make_tiny_target(folder / "tiny")
        there: list[int] = []
        rates: dict[int, float] = {}
        for count in (1, 2, 4):
            there += [nodes.add(num_gpus=8) for _ in range(count - len(there))]
            job, servers = start(nodes, target, folder / str(count), round(seconds * PER_SERVER * count))
            finish(job)
            rates[count] = rate(servers, count)
            nodes.wait_for_free_gpus()
        for node in there[1:]:
            nodes.remove(node)
        job, servers = start(nodes, target, folder / "joined", round(seconds * PER_SERVER * 3))
        wait_for(servers, round(seconds * PER_SERVER))
        nodes.add(num_gpus=8)
        finish(job)
        first, second = sorted(map(sent_at, requests_at(servers).values()))
        before = per_second(first, first[0], second[0])
        after = per_second(first + second, second[0], min(first[-1], second[-1]))
    result = {
        "ratio_to_linear": {str(count): round(rate / count / rates[1], 3) for count, rate in rates.items()},
        "joined_ratio": round(after / before / 2, 3),
        "of_the_servers": round(rates[1] / PER_SERVER, 3),
        "requests_per_second": {str(count): round(rate, 2) for count, rate in rates.items()},
        "requests_per_second_before_and_after_joining": [round(before, 2), round(after, 2)],
    }
    print(json.dumps(result))


def start(nodes: Nodes, target: Path, folder: Path, rows: int) -> tuple[Job, Path]:
    """A job of that many rows, and the folder of its servers' logs."""
    servers = folder / "servers"
    command = launch(servers, target, base_latency_s=LATENCY_S, max_running=RUNNING)
    words = settings(folder / "run", target, write_prompts(folder / "prompts.jsonl", rows))
    own = [f"target.launch={command}", "generate.servers=auto", "generate.gpus_per_server=8"]
    print(f"a job of {rows} rows", file=sys.stderr, flush=True)
    return nodes.jobs.start(*[word for word in words if "endpoints" not in word], *own), servers


def finish(job: Job) -> None:
    _, errors = job.communicate(timeout=900)
    if job.returncode != 0:
        raise SystemExit(f"the job ended with {job.returncode}:\n{errors[-4000:]}")


def wait_for(servers: Path, answers: int) -> None:
    deadline = time.monotonic() + 600
    while sum(map(len, requests_at(servers).values())) < answers:
        if time.monotonic() > deadline:
            raise SystemExit(f"the servers have not given {answers} answers in 600 s")
        time.sleep(0.2)


def sent_at(entries: list[dict[str, float]]) -> list[float]:
    """When a server got its requests, without those that filled it at first."""
    return sorted(entry["start"] for entry in entries)[2 * RUNNING :]


def rate(servers: Path, count: int) -> float:
    """Requests a second from when the last server has work until the first has none."""
    times = [sent_at(entries) for entries in requests_at(servers).values()]
    if len(times) != count:
        raise SystemExit(f"{len(times)} servers worked where there were {count} nodes")
    return per_second([*chain(*times)], max(t[0] for t in times), min(t[-1] for t in times))


def per_second(times: list[float], begin: float, end: float) -> float:
    return sum(begin < t <= end for t in times) / (end - begin)


if __name__ == "__main__":
    main()
