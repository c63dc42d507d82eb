"""Tokens/s of capturing hidden states, against the same engine and model without capturing.

    python benchmarks/capture.py [--sequences 48] [--rounds 3] [--backend both|sglang|transformers]

sglang: the server's prefill of the same sequences with nothing asked for, all in flight at once, against
`SGLangTarget.capture`. transformers: a bare loop of the model's forward passes over the same packed batches, against
`TransformersTarget.capture`. Rounds of both alternate, so that a change of the machine's load meets both; the medians
are compared. Prints a JSON line for each; the goal is a ratio of at least 0.95.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from eagle3_ray.sglang_cpu import model
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
            report("sglang", server, sequences, arguments.rounds)
        finally:
            server.close()
    if arguments.backend != "sglang":
        target = TransformersTarget(model(), dtype="float32", device="cpu", batch_tokens=BATCH_TOKENS)
        waste = padding_waste(target, sequences)
        report("transformers", target, sequences, arguments.rounds, waste)


def mixed_lengths(count: int) -> list[TokenSequence]:
    """Sequences of 50 to 500 random tokens: a prefill costs the same whatever the tokens say."""
    rng = np.random.default_rng(0)
    return [
        TokenSequence(str(n), rng.integers(49000, size=length, dtype=np.int32), 0)
        for n, length in enumerate(rng.integers(50, 500, size=count))
    ]


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
    target: SGLangTarget | TransformersTarget,
    sequences: list[TokenSequence],
    rounds: int,
    padding_waste: float | None = None,
) -> None:
    tokens = sum(len(sequence.ids) for sequence in sequences)
    target.capture(sequences[:4])  # warm up
    bare, captured = [], []
    for _ in range(rounds):
        bare.append(tokens / timed(lambda: target.prefill(sequences)))
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
