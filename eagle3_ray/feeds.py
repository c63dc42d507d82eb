"""Where a training worker's batches come from: the files of a cache, or actors that capture as they are asked.

A feed is asked for batches of the plan in order and keeps a few under way ahead of the one in hand, so memory is
bounded by their number. Neither feed decides what is trained on: the plan does, and the states' own proof.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
import torch

from eagle3_ray.batches import Batch
from eagle3_ray.corpus import Corpus
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.states_cache import STATES, StatesCache, decode

_AHEAD = 2
"""Batches under way beyond the one that is trained on."""
_Begun = TypeVar("_Begun")


@dataclass(frozen=True)
class Fed:
    """A batch with its states, and how many of its sequences must not train and so have an empty loss mask."""

    batch: PackedBatch
    set_aside: int


class Feed(Protocol):
    """Gives the plan's batches with their states."""

    def batches(self, wanted: Iterable[Batch]) -> Iterator[Fed]: ...


class CacheFeed:
    """Reads the files that the capture stage wrote. Sequences that it set aside are in the plan with an empty mask.

    Raises:
        DamagedShard: of the batch that is asked for.
    """

    def __init__(self, corpus: Corpus, folder: Path, hidden: int, storage: str) -> None:
        self._corpus = corpus
        self._cache = StatesCache(folder, hidden, storage)
        self._held = frozenset(self._cache.rows)
        self._hidden = hidden

    def batches(self, wanted: Iterable[Batch]) -> Iterator[Fed]:
        with ThreadPoolExecutor(_AHEAD) as readers:
            yield from _ahead(wanted, lambda batch: readers.submit(self._read, batch), Future.result)

    def _read(self, batch: Batch) -> Fed:
        rows = [row for row in batch.rows if row in self._held]
        read = [self._cache.read(row, self._corpus.token_sha(row)) for row in rows]
        if not rows:  # the plan holds a batch of sequences that were all set aside: an empty loss, for every worker
            row = batch.rows[0]
            blank = torch.zeros(int(self._corpus.tokens[row]), STATES * self._hidden, dtype=torch.bfloat16)
            return Fed(packed(self._corpus, [row], blank, torch.zeros(len(blank)).long(), {row}), len(batch.rows))
        states, likeliest = (torch.cat(tensors) for tensors in zip(*read, strict=True))
        return Fed(packed(self._corpus, rows, states, likeliest, set()), len(batch.rows) - len(rows))


class StreamFeed:
    """Asks actors that hold the target (`capturer.StreamCapturer`), each worker all of them in turn."""

    def __init__(self, corpus: Corpus, targets: Sequence[Any], first: int) -> None:
        self._corpus = corpus
        self._targets = list(targets)
        self._next = first

    def batches(self, wanted: Iterable[Batch]) -> Iterator[Fed]:
        return _ahead(wanted, self._ask, self._take)

    def _ask(self, batch: Batch) -> tuple[Batch, Any]:
        target = self._targets[self._next % len(self._targets)]
        self._next += 1
        return batch, target.fetch.remote(batch.rows)

    def _take(self, asked: tuple[Batch, Any]) -> Fed:
        batch, answer = asked
        stored, likeliest, reasons = ray.get(answer)
        bad = {row for row, reason in zip(batch.rows, reasons, strict=True) if reason is not None}
        with warnings.catch_warnings():  # the object store's memory cannot be written to, and nobody does
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            states, chosen = decode(stored, None, "bf16"), torch.from_numpy(likeliest)
        return Fed(packed(self._corpus, batch.rows, states, chosen, bad), len(bad))


def _ahead(wanted: Iterable[Batch], begin: Callable[[Batch], _Begun], take: Callable[[_Begun], Fed]) -> Iterator[Fed]:
    """What `take` makes of each batch that was begun, while the next few are under way."""
    under_way: deque[_Begun] = deque()
    for batch in wanted:
        under_way.append(begin(batch))
        if len(under_way) > _AHEAD:
            yield take(under_way.popleft())
    yield from map(take, under_way)


def packed(
    corpus: Corpus, rows: Sequence[int], states: torch.Tensor, likeliest: torch.Tensor, bad: set[int]
) -> PackedBatch:
    """Puts ids, states [T, 4H], likeliest tokens [T] and mask together; `bad` sequences get an empty mask."""
    lengths = [int(corpus.tokens[row]) for row in rows]
    mask = torch.zeros(sum(lengths), dtype=torch.bool)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        if row not in bad:
            mask[start + int(corpus.prompt_tokens[row]) : start + length] = True
        start += length
    hidden = states.shape[1] // STATES
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate([corpus.ids(row) for row in rows])).long(),
        aux_hidden=states[:, : 3 * hidden],
        last_hidden=states[:, 3 * hidden :],
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        loss_mask=mask,
        target_argmax=likeliest,
    )
