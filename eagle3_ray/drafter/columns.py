"""Which columns of a packed batch carry queries at which step, and which rows of them are supervised: indices only.

Step i of column p embeds token u = p+1+i and is taught by the target's distribution after token u. So everything about
a label is a property of u alone, and no hidden state, token or mask is ever shifted or copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eagle3_ray.drafter.attention import Run

SAMPLED_BLOCK = 32
"""Columns drawn together: runs of columns keep the attention free of masks."""


@dataclass(frozen=True)
class Columns:
    """Columns that carry queries at a step."""

    runs: tuple[Run, ...]
    index: Tensor  # [n] int64, token index of each column
    start: Tensor  # [n] of its sequence
    end: Tensor  # [n] of its sequence

    @classmethod
    def of(cls, runs: Sequence[Run], ends: dict[int, int]) -> "Columns":
        """`ends` gives the end of the sequence that starts at the key."""
        empty = [torch.zeros(0, dtype=torch.int64)]
        index = [torch.arange(run.column, run.column + run.length) for run in runs]
        start = [torch.full((run.length,), run.start) for run in runs]
        end = [torch.full((run.length,), ends[run.start]) for run in runs]
        return cls(tuple(runs), torch.cat(empty + index), torch.cat(empty + start), torch.cat(empty + end))


def taught_tokens(loss_mask: Tensor, cu_seqlens: Tensor, published: bool) -> Tensor:
    """Bool [T]: at u, whether the target's distribution after token u is a label where some column reaches it.

    The label of u is token u+1, so it counts where that is an answer token. `published` is the mask of the usual code,
    which shifts ids and targets but not the mask: it counts where token u-1 is an answer token.
    """
    mask = loss_mask.cpu()
    taught = torch.zeros_like(mask)
    for start, end in pairwise(cu_seqlens.tolist()):
        if published:
            taught[start + 1 : end] = mask[start : end - 1]
        else:
            taught[start + 1 : end - 1] = mask[start + 2 : end]
    return taught


def query_columns(taught: Tensor, cu_seqlens: Tensor, steps: int) -> Columns:
    """The columns from the first that reaches a label within `steps` to the last, of every sequence.

    All others, prompts mostly, give keys and values alone.
    """
    runs: list[Run] = []
    row = 0
    offsets = cu_seqlens.tolist()
    for start, end in pairwise(offsets):
        labels = taught[start:end].nonzero()
        if len(labels):
            first = max(start, start + int(labels[0]) - steps)
            length = start + int(labels[-1]) - first
            runs.append(Run(row, start, first, length))
            row += length
    return Columns.of(runs, dict(pairwise(offsets)))


def sample_columns(
    columns: Columns, cu_seqlens: Tensor, share: float, generator: torch.Generator | None
) -> tuple[Columns, Tensor, float]:
    """A random `share` of the columns, in blocks; each block is as likely as any other.

    Returns:
        The columns drawn, their rows [n'] among `columns`, and the factor that makes a sum over them unbiased.
    """
    blocks = [
        Run(run.row + at, run.start, run.column + at, min(SAMPLED_BLOCK, run.length - at))
        for run in columns.runs
        for at in range(0, run.length, SAMPLED_BLOCK)
    ]
    count = min(len(blocks), max(1, round(share * len(blocks))))
    drawn = [blocks[i] for i in sorted(torch.randperm(len(blocks), generator=generator)[:count].tolist())]
    rows = torch.cat([torch.arange(block.row, block.row + block.length) for block in drawn])
    runs: list[Run] = []
    row = 0
    for block in drawn:
        last = runs[-1] if runs else None
        if last and last.start == block.start and last.column + last.length == block.column:
            runs[-1] = Run(last.row, last.start, last.column, last.length + block.length)
        else:
            runs.append(Run(row, block.start, block.column, block.length))
        row += block.length
    offsets = cu_seqlens.tolist()
    return Columns.of(runs, dict(pairwise(offsets))), rows, len(blocks) / count
