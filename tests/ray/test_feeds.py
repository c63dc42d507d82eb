"""What a trainer that stalls leaves in the object store: the few batches that were asked for ahead, and no more."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from eagle3_ray import corpus
from eagle3_ray.batches import pack
from eagle3_ray.feeds import _AHEAD, StreamFeed
from eagle3_ray.runs import RunDir
from tests.writing_model import HIDDEN, make_tiny_run


@ray.remote(num_cpus=0)
class Target:
    """Answers as `capturer.StreamCapturer` does, and counts."""

    def __init__(self, tokens: dict[int, int]) -> None:
        self._tokens = tokens
        self._batches = 0

    def fetch(self, rows: Sequence[int]) -> Any:
        self._batches += 1
        tokens = sum(self._tokens[row] for row in rows)
        return np.zeros((tokens, 4 * HIDDEN), np.uint16), np.zeros(tokens, np.int64), [None] * len(rows)

    def batches(self) -> int:
        return self._batches


@pytest.mark.usefixtures("cluster")
def test_a_stalled_trainer_is_sent_a_few_batches_ahead(
    model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    made = corpus.make(RunDir(make_tiny_run(tmp_path / "run", model, sequences)))
    batches = pack(made.tokens, list(range(len(made))), 40, (0,))
    assert len(batches) > 20
    target = Target.remote({row: int(made.tokens[row]) for row in range(len(made))})
    feed = StreamFeed(made, [target], 0).batches(iter(batches))
    for taken in range(1, 8):
        next(feed)
        assert ray.get(target.batches.remote()) == taken + _AHEAD  # an actor's calls are done in their order
    ray.kill(target)
