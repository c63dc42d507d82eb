"""Rotary position embedding with the scalings that SGLang serves, from transformers-5 `rope_parameters`.

Formulas: RoFormer (arXiv 2104.09864); YaRN (2309.00071) with its attention factor; the smooth ramp of Llama 3.1.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_frequencies(rope: Mapping[str, Any], dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] in float32, and the factor on cosine and sine.

    Raises:
        ValueError: a rope_type that the drafter does not know.
    """
    theta = float(rope["rope_theta"])
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind not in SUPPORTED:
        raise ValueError(f"rope_type {kind!r} is not served for a drafter: use one of {', '.join(SUPPORTED)}.")
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(rope.get("original_max_position_embeddings") or max_positions)
    if kind == "llama3":
        low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
        smooth = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    return _yarn(rope, plain, dim, theta, factor, original), yarn_attention_factor(rope)


def _yarn(rope: Mapping[str, Any], plain: Tensor, dim: int, theta: float, factor: float, original: float) -> Tensor:
    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(float(rope.get("beta_fast") or 32)), channel(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """What multiplies cosine and sine: sglang 0.5.23 reads `mscale` and `mscale_all_dim` only when both are there."""
    factor, mscale, all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale is not None and all_dim is not None:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(all_dim))
    return yarn_mscale(factor) * float(rope.get("attn_factor", 1.0))


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [n, 1, dim / 2] in float32, of `positions` [n]."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's layout: channel j turns with channel j + dim/2. `x` is [n, heads, dim]; the dtype stays."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek's layout: channel 2j turns with channel 2j + 1. `x` is [n, heads, dim]; the dtype stays."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
