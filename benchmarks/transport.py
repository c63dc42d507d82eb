"""GB/s of states from a capturing actor to a training worker's batches, against bare arrays through the object store.

    python benchmarks/transport.py

Both sides get the same arrays, [4096, 4H] bfloat16 of H = 2048 (67 MB), from an actor that makes them without a target.
"""

import json
import os
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import ray

from eagle3_ray import corpus
from eagle3_ray.batches import Batch
from eagle3_ray.feeds import StreamFeed
from tests.runs import make_run, sequence

HIDDEN, TOKENS, BATCHES, ROUNDS = 2048, 4096, 24, 5


@ray.remote(num_cpus=0.5)
class Source:
    """Hands out states that are ready."""

    def __init__(self) -> None:
        self._states = np.random.default_rng(0).integers(0, 1 << 14, (TOKENS, 4 * HIDDEN), dtype=np.uint16)

    def fetch(self, rows: Any) -> tuple[Any, Any, list[None]]:
        return self._states, np.zeros(TOKENS, np.int64), [None] * len(rows)


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, log_to_driver=False, object_store_memory=2_000_000_000)
    with tempfile.TemporaryDirectory() as folder:
        rows = [sequence("q", range(TOKENS // 2), range(TOKENS - TOKENS // 2))]
        sequences = corpus.make(make_run(Path(folder) / "run", rows))
        source = Source.remote()
        size = BATCHES * TOKENS * 8 * HIDDEN / 1e9
        raw, fed = [], []
        for _ in range(ROUNDS + 1):
            raw.append(size / _seconds(lambda: _bare(source)))
            fed.append(size / _seconds(lambda: _feed(sequences, source)))
        raw_gbs, fed_gbs = statistics.median(raw[1:]), statistics.median(fed[1:])
    print(
        json.dumps(
            {
                "benchmark": "transport",
                "ratio": round(fed_gbs / raw_gbs, 3),
                "goal": 0.9,
                "feed_gb_per_second": round(fed_gbs, 2),
                "bare_gb_per_second": round(raw_gbs, 2),
            }
        )
    )
    ray.shutdown()


def _bare(source: Any) -> None:
    under_way = deque(source.fetch.remote((0,)) for _ in range(3))
    for number in range(BATCHES):
        ray.get(under_way.popleft())
        if number + 3 < BATCHES:
            under_way.append(source.fetch.remote((0,)))


def _feed(sequences: corpus.Corpus, source: Any) -> None:
    for fed in StreamFeed(sequences, [source], 0).batches([Batch((0,))] * BATCHES):
        assert len(fed.batch.input_ids) == TOKENS


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
