"""The gated MLP of Llama; of its four wide activations two are kept for the gradient and two made again."""

# mypy: allow-subclassing-any

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_ray.drafter.config import DrafterConfig


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight]
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            tensors = [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
        out: Tensor = _GatedMLP.apply(*tensors)
        return out


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        return F.linear(F.silu(gate).mul_(up), down_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        silu = F.silu(gate)
        d_down = grad.T @ (silu * up)
        d_product = grad @ down_weight
        d_up = silu.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
        d_x = torch.mm(d_gate, gate_weight).add_(d_up @ up_weight)
        return d_x, d_gate.T @ x, d_up.T @ x, d_down
