"""The draft vocabulary: which of the target's tokens a drafter can draft, from how often each is a label.

It knows counts and ids; which ids are special, boundaries or stops is told.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """A map between draft tokens and target tokens, in rising order of target id.

    Raises:
        ValueError: `d2t` and `t2d` do not name the same tokens.
    """

    d2t: Tensor  # [Vd] int64 offsets: draft token i is target token i + d2t[i]
    t2d: Tensor  # [V] bool: can this target token be drafted
    coverage: float | None  # share of the counted labels that can be drafted; None where it was inherited, not counted

    def __post_init__(self) -> None:
        if self.d2t.dtype != torch.int64 or self.t2d.dtype != torch.bool:
            raise ValueError(f"d2t is {self.d2t.dtype} and t2d {self.t2d.dtype}: they must be int64 and bool.")
        if not torch.equal(self.t2d.nonzero()[:, 0], self.target_ids()):
            raise ValueError(
                f"d2t names {len(self.d2t)} tokens and t2d {int(self.t2d.sum())}, and they are not the same ones in "
                "rising order: take both from one checkpoint."
            )

    def target_ids(self) -> Tensor:
        """[Vd] int64, rising."""
        return self.d2t + torch.arange(len(self.d2t))

    @classmethod
    def from_counts(cls, counts: Tensor, size: int, always: Collection[int] = ()) -> "DraftVocabulary":
        """The `size` tokens with the highest of `counts` [V] int64, ties by lower id; those in `always` come first.

        Give the target's special, turn-boundary and stop ids as `always`: a drafter that cannot draft the end of a turn
        is wrong at every end.

        Raises:
            ValueError: `size` or an id of `always` is out of range, or `always` alone is larger than `size`.
        """
        vocab_size = len(counts)
        kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
        if not 0 < size <= vocab_size:
            raise ValueError(f"draft_vocab_size {size} must be from 1 to the target's vocab_size {vocab_size}.")
        if len(kept) and not 0 <= int(kept[0]) <= int(kept[-1]) < vocab_size:
            raise ValueError(f"always-drafted ids {kept.tolist()} must lie in the target's vocabulary of {vocab_size}.")
        if len(kept) > size:
            raise ValueError(f"{len(kept)} always-drafted ids do not fit draft_vocab_size {size}: raise it.")
        rank = counts.clone()
        rank[kept] = torch.iinfo(torch.int64).max
        chosen = torch.sort(rank, descending=True, stable=True).indices[:size].sort().values
        coverage = float(counts[chosen].sum()) / max(1, int(counts.sum()))
        return cls._of(chosen, vocab_size, coverage)

    @classmethod
    def inherited(cls, d2t: Tensor, vocab_size: int) -> "DraftVocabulary":
        """The map of a checkpoint to warm start from.

        Raises:
            ValueError: the ids that `d2t` names do not rise, or reach beyond `vocab_size`.
        """
        chosen = d2t.to(torch.int64) + torch.arange(len(d2t))
        if not bool((chosen.diff() > 0).all()) or int(chosen[0]) < 0 or int(chosen[-1]) >= vocab_size:
            raise ValueError(
                f"d2t's target ids must rise within the target's vocabulary of {vocab_size}: "
                f"this map is of another target, or holds ids where offsets belong."
            )
        return cls._of(chosen, vocab_size, coverage=None)

    @classmethod
    def _of(cls, chosen: Tensor, vocab_size: int, coverage: float | None) -> "DraftVocabulary":
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[chosen] = True
        return cls(chosen - torch.arange(len(chosen)), t2d, coverage)
