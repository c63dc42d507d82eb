"""Attention over sequences packed one behind the other, without a mask and without padding.

Registered with transformers under PACKED. It knows plain causal attention only: a model that asks for a window, a
soft cap or sinks is refused, and the backend takes another way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "eagle3_ray_packed"
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_DIM = 256
_lengths: ContextVar[tuple[int, ...]] = ContextVar("lengths", default=())


class NotPlainAttention(ValueError):
    """The model asks for more than causal attention over its own sequence."""


@contextmanager
def sequences_of(lengths: Sequence[int]) -> Iterator[None]:
    """Tells the attention where sequences end. A context and not an argument: not every model hands arguments down."""
    token = _lengths.set(tuple(lengths))
    try:
        yield
    finally:
        _lengths.reset(token)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, T, heads, D].

    Raises:
        NotPlainAttention: a mask, window, soft cap or sink was asked for, or the layer is not causal.
    """
    lengths = _lengths.get()
    asked = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if attention_mask is not None or asked or not getattr(module, "is_causal", True) or not lengths:
        raise NotPlainAttention(f"{type(module).__name__} asks for {', '.join(asked) or 'a mask'}")
    if query.is_cuda and query.dtype in _FLASH_DTYPES and value.shape[-1] == query.shape[-1] <= _FLASH_HEAD_DIM:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(query.device, non_blocking=True)
        rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
        longest = max(lengths)
        out = varlen_attn(*rows, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out.unsqueeze(0), None
    pieces = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def register() -> None:
    """Makes PACKED known to transformers, which makes no mask for a name that only has an attention function."""
    AttentionInterface.register(PACKED, packed_attention)
