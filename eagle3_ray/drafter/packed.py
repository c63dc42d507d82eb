"""The training batch: several sequences one behind the other, without padding.

It knows where sequences end and which tokens are answers, and nothing of prompts, rows or workers.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Sequences one behind the other; T tokens, S sequences.

    Raises:
        ValueError: shapes or offsets do not fit together; the message names the field.
    """

    input_ids: Tensor  # [T] int64
    aux_hidden: Tensor  # [T, 3H]
    last_hidden: Tensor  # [T, H], post-norm
    cu_seqlens: Tensor  # [S + 1] int64, from 0 to T
    loss_mask: Tensor  # [T] bool; at token t: t is an answer token, so it may be a label
    target_argmax: Tensor | None = None
    """[T] int64: the target's most likely token after token t, where capture has kept it; else it is computed."""

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[0]
        columns = {"aux_hidden": self.aux_hidden, "last_hidden": self.last_hidden, "loss_mask": self.loss_mask}
        if self.target_argmax is not None:
            columns["target_argmax"] = self.target_argmax
        for name, column in columns.items():
            if column.shape[0] != tokens:
                raise ValueError(f"{name} has {column.shape[0]} rows, input_ids has {tokens}: one row a token, please.")
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask is {self.loss_mask.dtype}: it must be bool.")
        offsets = self.cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != tokens or any(a >= b for a, b in pairwise(offsets)):
            raise ValueError(f"cu_seqlens {offsets} must rise from 0 to the {tokens} tokens of input_ids.")

    def to(self, device: torch.device | str) -> "PackedBatch":
        return PackedBatch(
            self.input_ids.to(device, non_blocking=True),
            self.aux_hidden.to(device, non_blocking=True),
            self.last_hidden.to(device, non_blocking=True),
            self.cu_seqlens,  # read by the host only
            self.loss_mask.to(device, non_blocking=True),
            None if self.target_argmax is None else self.target_argmax.to(device, non_blocking=True),
        )
