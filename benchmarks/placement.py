"""What it brings to ask the server again that has read the beginning of a prompt: the turns of a conversation.

Two real SGLangs with their prefix caches on, one model thread each, and the fleet of the generate job. Conversations of
three turns, each question `--question` tokens and each answer `--answer`, go through it with and without naming the
server of the turn before, in turns of both. Prints one JSON line:

ratio        wall time without / with (median of the rounds)
cached       share of all prompt tokens that a server had in its cache already, without and with

    python benchmarks/placement.py              # about ten minutes
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.local_cluster import say  # noqa: E402
from eagle3_ray.sglang.fleet import Fleet  # noqa: E402
from eagle3_ray.sglang.probe import ProbeMaterial, probe  # noqa: E402
from eagle3_ray.sglang.protocol import Sampling  # noqa: E402
from eagle3_ray.sglang.transport import open_session  # noqa: E402
from eagle3_ray.sglang_cpu import Server, model  # noqa: E402

TURNS = 3
PREFILL = re.compile(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)")


class CachingServer(Server):
    """One with its prefix cache."""

    def __init__(self, target: Path, log: Path) -> None:
        super().__init__(target, log=log, threads=1, kv_tokens=65536)
        self._command = [word for word in self._command if word != "--disable-radix-cache"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--question", type=int, default=100, help="tokens of each question")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    target = model()
    sampling = Sampling(arguments.answer, 0.0, 1.0, logprobs=True, vocab_size=49152, stop_ids=frozenset({2}))
    with tempfile.TemporaryDirectory(prefix="e3r") as folder, ExitStack() as stack:
        logs = [Path(folder, f"{number}.log") for number in range(2)]
        servers = [stack.enter_context(CachingServer(target, log)) for log in logs]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        hits: dict[bool, list[float]] = {False: [], True: []}
        for round_ in range(arguments.rounds):
            for again in (False, True):
                before = [len(log.read_text()) for log in logs]
                seconds[again].append(asyncio.run(converse([s.url for s in servers], sampling, arguments, again)))
                hits[again].append(cached([log.read_text()[n:] for log, n in zip(logs, before, strict=True)]))
                say(f"round {round_}, {'the same server' if again else 'any server'}: {seconds[again][-1]:.1f} s")
    without, with_ = (statistics.median(seconds[again]) for again in (False, True))
    result = {
        "ratio": round(without / with_, 3),
        "cached": [round(statistics.median(hits[again]), 3) for again in (False, True)],
        "seconds_without": [round(s, 1) for s in seconds[False]],
        "seconds_with": [round(s, 1) for s in seconds[True]],
    }
    print(json.dumps(result))


async def converse(urls: list[str], sampling: Sampling, arguments: argparse.Namespace, again: bool) -> float:
    """Seconds from the first request to the last answer."""
    material = ProbeMaterial(model().name, None, (), "Hi", (26843,), (1, 26843), (2,))
    async with open_session(None, 600) as session:
        for url in urls:
            (await session.post(f"{url}/flush_cache")).raise_for_status()
        facts = [await probe(session, url, material, sampling) for url in urls]
    fleet = Fleet(
        facts,
        lambda: open_session(None, 600),
        material,
        sampling,
        max_in_flight=len(urls) * 8,
        share=1.0,
        attempts=2,
        outage_limit_s=60,
    )
    await fleet.start()
    words = random.Random(0)

    async def one(name: str, questions: list[list[int]]) -> None:
        ids: list[int] = []
        near = None
        for turn, question in enumerate(questions):
            ids += question
            answer, url, _, _ = await fleet.generate(f"{name}-{turn}", ids, arguments.answer, near if again else None)
            ids, near = [*ids, *answer.output_ids], url

    def question() -> list[int]:
        return [words.randrange(100, 40000) for _ in range(arguments.question)]

    talks = [[question() for _ in range(TURNS)] for _ in range(arguments.conversations)]
    started = time.monotonic()
    await asyncio.gather(*(one(f"c{number}", talk) for number, talk in enumerate(talks)))
    seconds = time.monotonic() - started
    await fleet.close()
    return seconds


def cached(logs: list[str]) -> float:
    """The share of prompt tokens that were in a cache, as the servers log it."""
    batches = [tuple(map(int, found)) for log in logs for found in PREFILL.findall(log)]
    return sum(hit for _, hit in batches) / sum(new + hit for new, hit in batches)


if __name__ == "__main__":
    main()
