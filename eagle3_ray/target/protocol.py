"""What every target backend promises: sequences of ids in, hidden states out, in the same order, with the same names.

Layers are named by HF `hidden_states` index: `hidden_states[k]` is what enters layer k. This module knows no engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from eagle3_ray.model_config import AUX_LAYERS


class CaptureError(RuntimeError):
    """The states that came back are not those of the sequences that were sent; none of them may be used."""


class TargetDead(RuntimeError):
    """The engine behind a target is gone; the sequences are not at fault: replace the target and send them again."""


class BatchHalved(UserWarning):
    """The target goes on with smaller forward passes."""


class TargetReplaced(UserWarning):
    """The engine died and was started again."""


@dataclass(frozen=True)
class TokenSequence:
    """What the target consumed and produced: `ids` int32 [T], of which the first `prompt_tokens` are the prompt.

    Raises:
        ValueError: an empty sequence, ids of another type or shape, or a boundary outside of them.
    """

    sequence_id: str
    ids: np.ndarray[Any, np.dtype[np.int32]]
    prompt_tokens: int

    def __post_init__(self) -> None:
        if self.ids.dtype != np.int32 or self.ids.ndim != 1 or not len(self.ids):
            raise ValueError(
                f"Sequence {self.sequence_id}: ids are {self.ids.dtype} {self.ids.shape}; give int32 [T], T > 0."
            )
        if not 0 <= self.prompt_tokens <= len(self.ids):
            raise ValueError(
                f"Sequence {self.sequence_id}: prompt_tokens={self.prompt_tokens} of {len(self.ids)} tokens; "
                "the boundary must lie within the sequence."
            )


@dataclass(frozen=True)
class States:
    """A sequence's states on the CPU, in the dtype that the target computes in (bfloat16 or float32).

    `aux_hidden` [T, 3H] are the inputs of the three captured layers side by side, `last_hidden` [T, H] is the output of
    the final norm.
    """

    sequence_id: str
    aux_hidden: torch.Tensor
    last_hidden: torch.Tensor

    def check(self, sequence: TokenSequence, hidden_size: int, dtype: torch.dtype) -> None:
        """Raises CaptureError if these are not the states of `sequence`: name, rows, widths, dtype, finite values."""
        rows = len(sequence.ids)
        if self.sequence_id != sequence.sequence_id:
            raise CaptureError(f"The states of sequence {self.sequence_id} came back for {sequence.sequence_id}.")
        for name, states, width in (
            ("aux_hidden", self.aux_hidden, AUX_LAYERS * hidden_size),
            ("last_hidden", self.last_hidden, hidden_size),
        ):
            if tuple(states.shape) != (rows, width):
                raise CaptureError(
                    f"Sequence {self.sequence_id}: {name} is {tuple(states.shape)}, not ({rows}, {width}). Fewer rows "
                    "mean chunked prefill or a cache hit, another width another number of layers."
                )
            if states.dtype != dtype:
                raise CaptureError(
                    f"Sequence {self.sequence_id}: {name} is {states.dtype}, the target computes {dtype}."
                )
            if not bool(torch.isfinite(states).all()):
                raise CaptureError(f"Sequence {self.sequence_id}: {name} holds NaN or infinity.")


class Target(Protocol):
    """A target model that gives hidden states away."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers by HF `hidden_states` index."""

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that it reads; None where only the memory is the limit."""

    def capture(self, sequences: Sequence[TokenSequence]) -> list[States]:
        """The states of each sequence, in the order given.

        Raises:
            CaptureError: states are missing or wrong.
            TargetDead: the engine is gone.
        """

    def prefill(self, sequences: Sequence[TokenSequence]) -> None:
        """Reads the sequences and gives nothing away: the speed that capturing is compared with.

        Raises:
            TargetDead: the engine is gone.
        """

    def close(self) -> None:
        """Gives back memory, processes and files. The target cannot be used any more."""


@dataclass(frozen=True)
class TargetParts:
    """What training needs of the target once. `config` is the language model's (its text_config if nested)."""

    embed_tokens: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V, H]; the embedding itself where they are tied
    norm: torch.Tensor  # [H]
    config: dict[str, Any]


_Item = TypeVar("_Item")


def in_groups(items: Sequence[_Item], tokens_of: Callable[[_Item], int], most_tokens: int) -> Iterator[list[_Item]]:
    """The items in order, in groups of at most `most_tokens` tokens, or of one item that has more."""
    group: list[_Item] = []
    tokens = 0
    for item in items:
        if group and tokens + tokens_of(item) > most_tokens:
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += tokens_of(item)
    if group:
        yield group


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Of the middle row of [T, D]: the first tokens of many models have states far larger than all others, and a
    flipped expert moves some rows, while a leak or a wrong layer moves all of them.
    """
    a, b = expected.float(), found.float()
    return float(((a - b).norm(dim=1) / a.norm(dim=1).clamp_min(1e-12)).median())
