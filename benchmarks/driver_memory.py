"""Memory of the generate job's driver with a million prompts, against its own memory at the first answer.

    python benchmarks/driver_memory.py [--prompts 1000000] [--minutes 5]

The prompts are ready ids, the server answers at once, and the run is cut short by SIGTERM after so many minutes of
generating. Prints one JSON line; the goal is a growth of less than 200 MB between the start of the plan and the end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs import fake_server, settings  # noqa: E402
from tests.tiny_target import make_tiny_target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=5, help="how long to generate")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = make_tiny_target(Path(scratch) / "tiny-target")
        prompts = Path(scratch) / "million.jsonl"
        with prompts.open("w") as file:
            for i in range(arguments.prompts):
                ids = [100 + i % 250, 100 + i // 250 % 250, 100 + i // 62500 % 250, 100 + i % 97, 100 + i % 89]
                file.write(f'{{"id": "{i}", "input_ids": {ids}}}\n')
        with fake_server(target, mean_tokens=8) as server:
            words = settings(Path(scratch) / "run", target, prompts, server.url)
            command = [sys.executable, "jobs/generate.py", "smollm2-cpu", *words]
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
            started = time.monotonic()
            job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
            journal = Path(scratch) / "run" / "generate" / "journal"
            process, series, first_answer = psutil.Process(job.pid), [], None
            while job.poll() is None:
                now = time.monotonic() - started
                series.append((now, process.memory_info().rss / 1e6))
                if first_answer is None and any(journal.glob("*.jsonl")):
                    first_answer = now
                if first_answer is not None and now > first_answer + 60 * arguments.minutes:
                    job.send_signal(signal.SIGTERM)
                    job.wait()
                    break
                time.sleep(1)
            answered = sum(1 for file in journal.glob("*.jsonl") for _ in file.open("rb"))
    settled = [mb for second, mb in series if second > 15]
    print(
        json.dumps(
            {
                "benchmark": "driver_memory",
                "growth_mb": round(max(settled) - settled[0]),
                "goal_mb": 200,
                "start_mb": round(settled[0]),
                "most_mb": round(max(settled)),
                "prompts": arguments.prompts,
                "answers": answered,
                "plan_s": round(first_answer or 0),
                "generating_s": round(series[-1][0] - (first_answer or 0)),
            }
        )
    )


if __name__ == "__main__":
    main()
