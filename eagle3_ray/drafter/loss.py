# mypy: allow-subclassing-any, allow-untyped-decorators
"""Soft cross entropy of the drafter against the target, and the target's own distributions: in chunks, no logits kept.

The teacher is softmax(last_hidden @ lm_head[draft rows]^T): the target's distribution renormalised over the draft
vocabulary, which is what the softmax of fewer logits is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 21
"""Logits made at a time: they stay in the last-level cache of a CPU, and are no burden to a GPU."""


class CrossEntropy(NamedTuple):
    loss: Tensor  # scalar: sum over steps of weight * sum over rows
    step_sums: list[Tensor]  # [], unweighted, no gradient
    predicted: list[Tensor]  # [rows of the step] int64: the drafter's most likely draft token


def soft_cross_entropy(
    hidden: Sequence[Tensor],
    rows: Sequence[Tensor],
    teacher_rows: Sequence[Tensor],
    step_weights: Sequence[float],
    lm_head: Tensor,
    teacher: Tensor,
) -> CrossEntropy:
    """Linear layer and soft cross entropy in one, for all steps together.

    `hidden` holds a step's post-norm states [n_i, H]; `rows` which of them count, `teacher_rows` their rows of
    `teacher` [m, Vd] (probabilities). `lm_head` is [Vd, H]. Where a gradient is wanted, the forward pass makes it.
    """
    wanted = torch.is_grad_enabled()
    loss, *rest = _SoftCrossEntropy.apply(
        lm_head, teacher, tuple(rows), tuple(teacher_rows), tuple(step_weights), wanted, *hidden
    )
    return CrossEntropy(loss, rest[: len(hidden)], rest[len(hidden) :])


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lm_head: Tensor,
        teacher: Tensor,
        rows: tuple[Tensor, ...],
        teacher_rows: tuple[Tensor, ...],
        step_weights: tuple[float, ...],
        wanted: bool,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        weight = lm_head.to(hidden[0].dtype)
        grad_weight = torch.zeros_like(lm_head, dtype=torch.float32) if wanted else None
        chunk = max(1, CHUNK_ELEMENTS // lm_head.shape[0])
        sums, predicted, grads = [], [], []
        for h, mine, theirs, step_weight in zip(hidden, rows, teacher_rows, step_weights, strict=True):
            total = torch.zeros((), dtype=torch.float32, device=h.device)
            best = []
            grad_h = torch.zeros_like(h) if wanted else None
            for at, teach in zip(mine.split(chunk), theirs.split(chunk), strict=True):
                x = h[at]
                p = teacher[teach].float()
                logits = (x @ weight.T).float()
                top, index = logits.max(-1, keepdim=True)
                best.append(index[:, 0])
                logits -= top
                expected = torch.linalg.vecdot(p, logits)
                q = logits.exp_()
                mass = q.sum(-1, keepdim=True)
                total += (mass.log()[:, 0] - expected).sum()
                if grad_h is not None and grad_weight is not None:
                    d = q.div_(mass).sub_(p).mul_(step_weight).to(x.dtype)
                    grad_h[at] = d @ weight
                    if d.dtype == torch.float32:
                        grad_weight.addmm_(d.T, x)
                    else:
                        grad_weight += d.T @ x
            sums.append(total)
            predicted.append(torch.cat(best) if best else mine)
            grads.append(grad_h)
        loss = torch.stack([total * w for total, w in zip(sums, step_weights, strict=True)]).sum()
        if wanted:
            ctx.save_for_backward(grad_weight, *grads)
        ctx.head_dtype = lm_head.dtype
        ctx.mark_non_differentiable(*sums, *predicted)
        return loss, *sums, *predicted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        grad_weight, *grads = ctx.saved_tensors
        scaled = tuple(g * grad.to(g.dtype) for g in grads)
        return (grad_weight * grad).to(ctx.head_dtype), None, None, None, None, None, *scaled


@torch.no_grad()
def teacher_probabilities(last_hidden: Tensor, draft_rows: Tensor) -> Tensor:
    """softmax(last_hidden [m, H] @ draft_rows [Vd, H]^T) in the dtype of `draft_rows`, made in chunks."""
    teacher = torch.empty(len(last_hidden), len(draft_rows), dtype=draft_rows.dtype, device=draft_rows.device)
    chunk = max(1, CHUNK_ELEMENTS // len(draft_rows))
    for part, out in zip(last_hidden.split(chunk), teacher.split(chunk), strict=True):
        out.copy_((part.to(draft_rows.dtype) @ draft_rows.T).float().softmax(-1))
    return teacher


@torch.no_grad()
def greedy_tokens(last_hidden: Tensor, lm_head: Tensor) -> Tensor:
    """The target's most likely next token, int64 [m], after each of `last_hidden` [m, H]: argmax over all of V."""
    chunk = max(1, 4 * CHUNK_ELEMENTS // len(lm_head))
    best = [(part.to(lm_head.dtype) @ lm_head.T).argmax(-1) for part in last_hidden.split(chunk)]
    return torch.cat(best) if best else torch.zeros(0, dtype=torch.int64, device=lm_head.device)
