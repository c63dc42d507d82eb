# mypy: allow-subclassing-any, allow-untyped-decorators
"""Attention of one training-time-test step: step 0's keys of the columns so far, and the own column's later keys.

The keys of step 0 go through a fused kernel that gives its log-sum-exp; the few own keys are merged in exactly:

    lse = log(exp(lse_0) + sum_j exp(s_j)),  out = exp(lse_0 - lse) out_0 + sum_j exp(s_j - lse) v_j

No score matrix is kept and no mask is made. The backward pass hands the kernel the merged `out` and `lse`: its own
formula, dS = P * (dP - rowsum(dO * out)) with P = exp(S - lse) (FlashAttention-2, arXiv 2307.08691), then is exact for
its share of the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """Consecutive columns that carry queries; `row` counts query rows, `start` and `column` count tokens."""

    row: int  # of the first one among the queries
    start: int  # of its sequence: the first key it sees
    column: int  # the first column
    length: int


def chain_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own: Sequence[tuple[Tensor, Tensor]], runs: Sequence[Run], scale: float
) -> Tensor:
    """Heads [n, heads, Dv] of queries `q` [n, heads, D], whose columns the `runs` name in order.

    `k0` [T, heads, D] and `v0` [T, heads, Dv] are step 0's of all columns; `own` holds keys and values [n, heads, .] of
    steps 1 to the present one.
    """
    width, narrow = q.shape[-1], v0.shape[-1]
    if narrow < width:  # the kernels want one width: zero columns of v change nothing
        v0 = torch.nn.functional.pad(v0, (0, width - narrow))
        own = [(k, torch.nn.functional.pad(v, (0, width - narrow))) for k, v in own]
    out: Tensor = _ChainAttention.apply(q, k0, v0, tuple(runs), scale, *(tensor for pair in own for tensor in pair))
    return out[..., :narrow]


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, runs: tuple[Run, ...], scale: float, *own: Tensor
    ) -> Tensor:
        outs, lses = [], []
        for run in runs:
            out, lse = _kernel(*_slices(run, q, k0, v0), True, scale)
            if run.column > run.start:
                before = slice(run.start, run.column)
                out_b, lse_b = _kernel(q[_rows(run)], k0[before], v0[before], False, scale)
                merged = torch.logaddexp(lse, lse_b)
                out = out * _share(lse, merged) + out_b * _share(lse_b, merged)
                lse = merged
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        scores = [_dot(q, k) * scale for k in own[0::2]]
        if scores:
            merged = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
            out = out * _share(lse, merged)
            for score, v in zip(scores, own[1::2], strict=True):
                out.addcmul_(v, _share(score, merged))
            lse = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k0, v0, out, lse, *own)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        for run in ctx.runs:
            rows, at = _rows(run), slice(run.column, run.column + run.length)
            given = grad[rows], q[rows], out[rows], lse[rows]
            dq[rows], dk, dv = _kernel_backward(*given, k0[at], v0[at], True, ctx.scale)
            dk0[at] += dk
            dv0[at] += dv
            if run.column > run.start:
                before = slice(run.start, run.column)
                dq_b, dk, dv = _kernel_backward(*given, k0[before], v0[before], False, ctx.scale)
                dq[rows] += dq_b
                dk0[before] += dk
                dv0[before] += dv
        delta = _dot(grad, out)
        d_own: list[Tensor] = []
        for k, v in zip(own[0::2], own[1::2], strict=True):
            share = _share(_dot(q, k) * ctx.scale, lse)
            d_score = (share * (_dot(grad, v)[..., None] - delta[..., None]) * ctx.scale).to(q.dtype)
            dq.addcmul_(k, d_score)
            d_own += [d_score * q, (share * grad).to(v.dtype)]
        return dq, dk0, dv0, None, None, *d_own


def _rows(run: Run) -> slice:
    return slice(run.row, run.row + run.length)


def _slices(run: Run, q: Tensor, k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at = slice(run.column, run.column + run.length)
    return q[_rows(run)], k0[at], v0[at]


def _share(lse: Tensor, whole: Tensor) -> Tensor:
    return (lse - whole).exp()[..., None]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a.float(), b.float())


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [n, heads, D] in float32 and log-sum-exp [n, heads]. CUDA's efficient kernel takes float32, too."""
    q, k, v = map(_heads_first, (q, k, v))
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        lse = lse[..., : q.shape[2]]  # it comes padded to a multiple of 32
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1).float(), lse[0].transpose(0, 1)


def _kernel_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for the keys given; `out` and `lse` are those of all keys."""
    grad, q, out, k, v = map(_heads_first, (grad, q, out, k, v))
    lse = _heads_first(lse)
    if q.is_cuda:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device="cpu")
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    dq, dk, dv = (g[0].transpose(0, 1) for g in grads)
    return dq, dk, dv
