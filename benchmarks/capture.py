"""Tokens/s of capturing hidden states, against the same engine and model without capturing.

    python benchmarks/capture.py [--sequences 48] [--rounds 3] [--backend both|sglang|transformers]

sglang: the server's prefill of the same sequences with nothing asked for, all in flight at once, against
`SGLangTarget.capture`. transformers: a bare loop of the model's forward passes over the same packed batches, against
`TransformersTarget.capture`. Rounds of both alternate, so that a change of the machine's load meets both; the medians
are compared. Prints a JSON line for each; the goal is a ratio of at least 0.95.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np
import torch

from eagle3_ray.sglang_cpu import model
from eagle3_ray.target.packed_attention import sequences_of
from eagle3_ray.target.protocol import TokenSequence
from eagle3_ray.target.sglang_backend import SGLangTarget
from eagle3_ray.target.transformers_backend import TransformersTarget

BATCH_TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=["both", "sglang", "transformers"], default="both")
    arguments = parser.parse_args()
    sequences = mixed_lengths(arguments.sequences)
    if arguments.backend != "transformers":
        server = SGLangTarget.start(model())
        try:
            report("sglang", lambda: asyncio.run(prefill(server.url, sequences)), server, sequences, arguments.rounds)
        finally:
            server.close()
    if arguments.backend != "sglang":
        target = TransformersTarget(model(), dtype="float32", device="cpu", batch_tokens=BATCH_TOKENS)
        waste = padding_waste(target, sequences)
        report("transformers", lambda: bare_forwards(target, sequences), target, sequences, arguments.rounds, waste)


def mixed_lengths(count: int) -> list[TokenSequence]:
    """Sequences of 50 to 500 random tokens: a prefill costs the same whatever the tokens say."""
    rng = np.random.default_rng(0)
    return [
        TokenSequence(str(n), rng.integers(49000, size=length, dtype=np.int32), 0)
        for n, length in enumerate(rng.integers(50, 500, size=count))
    ]


async def prefill(url: str, sequences: Sequence[TokenSequence]) -> None:
    async def one(session: aiohttp.ClientSession, sequence: TokenSequence) -> None:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": sequence.ids.tolist(), "sampling_params": sampling}
        async with session.post(f"{url}/generate", json=body) as answer:
            await answer.json()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(one(session, sequence) for sequence in sequences))


def bare_forwards(target: TransformersTarget, sequences: Sequence[TokenSequence]) -> None:
    """The model alone on the batches that the backend makes: nothing is taken out of it and nothing is kept."""
    for batch in target._batches(sequences):
        lengths = [len(sequence.ids) for sequence in batch]
        ids = torch.from_numpy(np.concatenate([sequence.ids for sequence in batch])).long()
        positions = torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad(), sequences_of(lengths):
            target._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)


def padding_waste(target: TransformersTarget, sequences: Sequence[TokenSequence]) -> float:
    """The share of the positions that the model computes which are no token of a sequence."""
    computed = 0

    def count(_model: object, _args: object, inputs: dict[str, torch.Tensor]) -> None:
        nonlocal computed
        computed += inputs["input_ids"].numel()

    hook = target._decoder.register_forward_pre_hook(count, with_kwargs=True)
    target.capture(sequences)
    hook.remove()
    return 1 - sum(len(sequence.ids) for sequence in sequences) / computed


def report(
    name: str,
    baseline: Callable[[], None],
    target: SGLangTarget | TransformersTarget,
    sequences: list[TokenSequence],
    rounds: int,
    padding_waste: float | None = None,
) -> None:
    tokens = sum(len(sequence.ids) for sequence in sequences)
    target.capture(sequences[:4])  # warm up
    bare, captured = [], []
    for _ in range(rounds):
        bare.append(tokens / timed(baseline))
        captured.append(tokens / timed(lambda: target.capture(sequences)))
    print(
        json.dumps(
            {
                "benchmark": f"capture_{name}",
                "ratio": round(statistics.median(captured) / statistics.median(bare), 3),
                "goal": 0.95,
                "tokens": tokens,
                "padding_waste": padding_waste,  # None: the engine's own batches, which it packs
                "captured_tokens_per_second": [round(speed) for speed in captured],
                "bare_tokens_per_second": [round(speed) for speed in bare],
            }
        ),
        flush=True,
    )


def timed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
