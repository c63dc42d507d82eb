"""Tokens/s of the generate job on a real SGLang, with nothing tuned, against the best fixed concurrency of a sweep.

    python benchmarks/generate_engine.py [--concurrency 8,16,32,64,128] [--tokens 64]

Baseline: a plain asyncio and aiohttp client that keeps a fixed number of requests in flight, a run for each number, on
the same server and prompts. Ours: `jobs/generate.py` as it is. Both count answer tokens from the first request
to the last answer. Prints one JSON line; the goal is a ratio of at least 0.95.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from eagle3_ray.prompts import find, parse, read
from eagle3_ray.rendering import Renderer
from eagle3_ray.sglang_cpu import Server, model

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "demo" / "prompts"
PARTITIONS = ["arithmetic", "code", "everyday"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="8,16,32,64,128", help="numbers of requests in flight to try")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    arguments = parser.parse_args()
    folder = model()
    renderer = Renderer(folder)
    prompts = [
        renderer.prompt_ids(parse(raw, str(line)))
        for source in find(str(PROMPTS), PARTITIONS)
        for line, raw in read(source)
    ]
    with Server(folder) as server:
        asyncio.run(fixed(server.url, prompts[:16], 16, 8))  # warm up
        sweep = {
            c: asyncio.run(fixed(server.url, prompts, c, arguments.tokens))
            for c in map(int, arguments.concurrency.split(","))
        }
        ours = untuned(server.url, arguments.tokens)
    best = max(sweep, key=lambda c: sweep[c])
    print(
        json.dumps(
            {
                "benchmark": "generate_engine",
                "ratio": round(ours / sweep[best], 3),
                "goal": 0.95,
                "ours_tokens_per_second": ours,
                "best_concurrency": best,
                "sweep_tokens_per_second": {c: round(speed, 1) for c, speed in sweep.items()},
            }
        )
    )


async def fixed(url: str, prompts: list[list[int]], concurrency: int, tokens: int) -> float:
    """Answer tokens a second with that many requests in flight."""
    semaphore, total = asyncio.Semaphore(concurrency), 0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:

        async def one(prompt_ids: list[int]) -> None:
            nonlocal total
            body = {
                "input_ids": prompt_ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
                "return_logprob": True,
            }
            async with semaphore, session.post(f"{url}/generate", json=body) as response:
                total += len((await response.json())["output_ids"])

        started = time.monotonic()
        await asyncio.gather(*(one(prompt_ids) for prompt_ids in prompts))
        return total / (time.monotonic() - started)


def untuned(url: str, tokens: int) -> float:
    """Answer tokens a second of the job."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "jobs/generate.py",
            "smollm2-cpu",
            f"run.dir={scratch}/run",
            f"prompts.path={PROMPTS}",
        ]
        command += [f"prompts.partitions={','.join(PARTITIONS)}", f"generate.endpoints={url}"]
        command += [f"generate.max_new_tokens={tokens}"]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


if __name__ == "__main__":
    main()
