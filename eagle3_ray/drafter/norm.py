"""RMSNorm, computed in float32 whatever the dtype of its input.

Its gradient is written out: autograd would keep the normed input beside the input, at every step of the rollout.
"""

# mypy: allow-subclassing-any

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = x rstd w: dw = sum(dy x rstd), dx = rstd (dy w - x rstd mean(dy w x rstd))."""
        x, weight, rstd = ctx.saved_tensors
        normed, grad = x.float() * rstd, grad.float()
        d_weight = (grad * normed).sum(tuple(range(grad.dim() - 1)))
        grad = grad * weight
        mean = torch.linalg.vecdot(grad, normed)[..., None] / x.shape[-1]
        return (grad - normed.mul_(mean)).mul_(rstd).to(x.dtype), d_weight.to(weight.dtype), None
