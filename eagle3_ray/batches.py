"""The batch plan: which sequences are trained on together, in which order, from their lengths alone.

It is a pure function of the lengths, the sizes and the seed, and knows nothing of workers, files or states. So the
number of the next step is all the progress that there is: a resumed job makes the same plan and goes on behind it, on
any number of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WINDOW = 2048
"""Sequences that are packed together: enough for full batches, few enough that the order stays that of the shuffle."""


@dataclass(frozen=True)
class Batch:
    """Sequences that are packed one behind the other into one forward and backward."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What one optimiser step sees."""

    number: int  # from 0, over all epochs
    epoch: int
    batches: tuple[Batch, ...]


def pack(tokens: npt.NDArray[np.int64], rows: Sequence[int], batch_tokens: int, seed: Sequence[int]) -> list[Batch]:
    """Packs the sequences `rows` into batches of at most `batch_tokens` tokens, both in an order drawn by `seed`.

    Best fit, longest first, within windows of the shuffled order. A sequence that is longer than a batch gets one of
    its own: nothing is cut.
    """
    rng = np.random.default_rng(list(seed))
    shuffled = rng.permutation(np.asarray(rows, np.int64))
    batches: list[Batch] = []
    for first in range(0, len(shuffled), _WINDOW):
        window = shuffled[first : first + _WINDOW]
        batches += _best_fit(tokens, window[np.argsort(-tokens[window], kind="stable")], batch_tokens)
    return [batches[place] for place in rng.permutation(len(batches))]


def steps(
    tokens: npt.NDArray[np.int64],
    rows: Sequence[int],
    *,
    batch_tokens: int,
    step_tokens: int,
    epochs: int,
    seed: int,
) -> Iterator[Step]:
    """The plan of a whole training: every epoch packs anew, and a step takes batches until `step_tokens` is nearest.

    An epoch's last step may be smaller; one of less than half a step's tokens joins the step before it.
    """
    number = 0
    for epoch in range(epochs):
        batches = pack(tokens, rows, batch_tokens, (seed, epoch))
        for group in _groups(tokens, batches, step_tokens):
            yield Step(number, epoch, tuple(group))
            number += 1


def _best_fit(tokens: npt.NDArray[np.int64], longest_first: npt.NDArray[np.int64], room: int) -> list[Batch]:
    open_batches: list[list[int]] = []
    free = np.zeros(len(longest_first), np.int64)
    for row in longest_first:
        length = int(tokens[row])
        left = free[: len(open_batches)]
        fitting = np.flatnonzero(left >= length)
        if len(fitting):
            best = int(fitting[np.argmin(left[fitting])])
            open_batches[best].append(int(row))
            free[best] -= length
        else:
            free[len(open_batches)] = max(0, room - length)
            open_batches.append([int(row)])
    return [Batch(tuple(batch)) for batch in open_batches]


def _groups(tokens: npt.NDArray[np.int64], batches: Sequence[Batch], step_tokens: int) -> Iterator[list[Batch]]:
    groups: list[list[Batch]] = []
    sizes: list[int] = []
    for batch in batches:
        size = sum(int(tokens[row]) for row in batch.rows)
        if not groups or sizes[-1] + size / 2 >= step_tokens:
            groups.append([])
            sizes.append(0)
        groups[-1].append(batch)
        sizes[-1] += size
    if len(groups) > 1 and sizes[-1] < step_tokens / 2:
        remainder = groups.pop()
        groups[-1] += remainder
    yield from groups
