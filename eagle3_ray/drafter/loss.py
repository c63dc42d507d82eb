# mypy: allow-subclassing-any, allow-untyped-decorators
"""The drafter's loss against the target, and the target's own distributions: in chunks, no logits kept.

The teacher p is softmax(last_hidden @ lm_head[draft rows]^T): the target's distribution renormalised over the draft
vocabulary, which is what the softmax of fewer logits is. The drafter's distribution is q.

"kl" is the soft cross entropy of q against p: KL(p, q) and the teacher's entropy, which has no gradient. "lk" is the
hybrid LK loss (Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding", arXiv
2602.23881). With alpha = sum_x min(p(x), q(x)), the rate at which tokens drawn from q are accepted, it is

    lk = b * kl + (1 - b) * (1 - alpha),   b = exp(-3 alpha), held constant.

1 - alpha alone hardly learns from scratch: where q is next to nothing, so is its gradient. kl leads until p and q
overlap. The paper takes b from the mean alpha of a batch; here each position has its own, so that the loss depends
neither on packing nor on the number of workers.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 21
"""Logits made at a time: they stay in the last-level cache of a CPU, and are no burden to a GPU."""

LK_DECAY = 3.0
"""How fast "lk" turns from cross entropy to acceptance: the paper's value for EAGLE-3."""

Loss = Literal["kl", "lk"]


class Scored(NamedTuple):
    loss: Tensor  # scalar: sum over steps of weight * sum over rows
    step_sums: list[Tensor]  # [], cross entropies whatever the loss is; unweighted, no gradient
    predicted: list[Tensor]  # [rows of the step] int64: the drafter's most likely draft token


def fused_loss(
    hidden: Sequence[Tensor],
    rows: Sequence[Tensor],
    teacher_rows: Sequence[Tensor],
    step_weights: Sequence[float],
    lm_head: Tensor,
    teacher: Tensor,
    loss: Loss = "kl",
) -> Scored:
    """Linear layer and loss in one, for all steps together.

    `hidden` holds a step's post-norm states [n_i, H]; `rows` which of them count, `teacher_rows` their rows of
    `teacher` [m, Vd] (probabilities). `lm_head` is [Vd, H]. Where a gradient is wanted, the forward pass makes it.
    """
    wanted = torch.is_grad_enabled()
    total, *rest = _FusedLoss.apply(
        lm_head, teacher, tuple(rows), tuple(teacher_rows), tuple(step_weights), loss, wanted, *hidden
    )
    return Scored(total, rest[: len(hidden)], rest[len(hidden) :])


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lm_head: Tensor,
        teacher: Tensor,
        rows: tuple[Tensor, ...],
        teacher_rows: tuple[Tensor, ...],
        step_weights: tuple[float, ...],
        loss: Loss,
        wanted: bool,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        weight = lm_head.to(hidden[0].dtype)
        grad_weight = torch.zeros_like(lm_head, dtype=torch.float32) if wanted else None
        chunk = max(1, CHUNK_ELEMENTS // lm_head.shape[0])
        sums, losses, predicted, grads = [], [], [], []
        for h, mine, theirs, step_weight in zip(hidden, rows, teacher_rows, step_weights, strict=True):
            total = torch.zeros((), dtype=torch.float32, device=h.device)
            lk = torch.zeros_like(total)
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
                cross_entropy = mass.log()[:, 0] - expected
                total += cross_entropy.sum()
                if loss == "lk":
                    lk += _lk(p, q.div_(mass), cross_entropy).sum()
                elif wanted:
                    q.div_(mass).sub_(p)
                if grad_h is not None and grad_weight is not None:
                    d = q.mul_(step_weight).to(x.dtype)  # q is the gradient by now
                    grad_h[at] = d @ weight
                    if d.dtype == torch.float32:
                        grad_weight.addmm_(d.T, x)
                    else:
                        grad_weight += d.T @ x
            sums.append(total)
            losses.append(lk if loss == "lk" else total)
            predicted.append(torch.cat(best) if best else mine)
            grads.append(grad_h)
        weighted = torch.stack([of_step * w for of_step, w in zip(losses, step_weights, strict=True)]).sum()
        if wanted:
            ctx.save_for_backward(grad_weight, *grads)
        ctx.head_dtype = lm_head.dtype
        ctx.mark_non_differentiable(*sums, *predicted)
        return weighted, *sums, *predicted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        grad_weight, *grads = ctx.saved_tensors
        scaled = tuple(g * grad.to(g.dtype) for g in grads)
        return (grad_weight * grad).to(ctx.head_dtype), None, None, None, None, None, None, *scaled


def _lk(p: Tensor, q: Tensor, cross_entropy: Tensor) -> Tensor:
    """The LK loss [n] of rows p and q [n, Vd]; leaves its gradient by the logits in `q`.

    alpha grows with q_x where q_x < p_x, by as much. q is a softmax, dq_x/dz_j = q_x ([x = j] - q_j). So with u_x = q_x
    where q_x < p_x and 0 elsewhere, d(1 - alpha)/dz = q sum(u) - u; that of the cross entropy is q - p.
    """
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    blend = (-LK_DECAY * alpha).exp_()
    under = torch.where(q < p, q, 0.0)
    q.mul_(blend + (1 - blend) * under.sum(-1, keepdim=True))
    q.addcmul_(under, 1 - blend, value=-1).addcmul_(p, blend, value=-1)
    return (blend * cross_entropy[:, None] + (1 - blend) * (1 - alpha))[:, 0]


@torch.no_grad()
def teacher_probabilities(last_hidden: Tensor, draft_rows: Tensor, softcap: float | None = None) -> Tensor:
    """softmax(last_hidden [m, H] @ draft_rows [Vd, H]^T) in the dtype of `draft_rows`, made in chunks.

    `softcap` c makes logits x to c * tanh(x / c) first, as the target does (transformers: modeling_gemma2.py).
    """
    teacher = torch.empty(len(last_hidden), len(draft_rows), dtype=draft_rows.dtype, device=draft_rows.device)
    chunk = max(1, CHUNK_ELEMENTS // len(draft_rows))
    for part, out in zip(last_hidden.split(chunk), teacher.split(chunk), strict=True):
        logits = (part.to(draft_rows.dtype) @ draft_rows.T).float()
        out.copy_((logits if softcap is None else torch.tanh(logits / softcap) * softcap).softmax(-1))
    return teacher


@torch.no_grad()
def greedy_tokens(last_hidden: Tensor, lm_head: Tensor) -> Tensor:
    """The target's most likely next token, int64 [m], after each of `last_hidden` [m, H]: argmax over all of V."""
    chunk = max(1, 4 * CHUNK_ELEMENTS // len(lm_head))
    best = [(part.to(lm_head.dtype) @ lm_head.T).argmax(-1) for part in last_hidden.split(chunk)]
    return torch.cat(best) if best else torch.zeros(0, dtype=torch.int64, device=lm_head.device)
