"""Training-time test (EAGLE-3, arXiv 2503.01840): the drafter drafts `ttt_steps` tokens from every column at once.

Step i of column p embeds token p+1+i, takes its own state of the step before (step 0: the fused aux states of p), turns
by RoPE position p+i, and attends to step 0's keys of columns 0..p and its own keys of steps 1..i. Its label is the
target's distribution for token p+2+i, renormalised over the draft vocabulary; where the target's most likely token is
outside of it there is no label.

The embedding's half of a projection is the same for token t in whatever step it comes up (RoPE turns it alike, too),
so it is multiplied once a token, not once a step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_ray.drafter.attention import chain_attention
from eagle3_ray.drafter.columns import Columns, query_columns, sample_columns, taught_tokens
from eagle3_ray.drafter.loss import Loss, fused_loss, greedy_tokens, teacher_probabilities
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch


@dataclass(frozen=True)
class TargetHead:
    """The target's two frozen matrices, on the drafter's device. The compute dtype saves a cast at every step."""

    embed_tokens: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]
    softcap: float | None = None  # of the logits (`final_logit_softcapping`, Gemma)


@dataclass(frozen=True)
class Rollout:
    """Sums of one batch, for the caller to add up over workers and divide; only `loss` carries a gradient."""

    loss: Tensor  # []: sum_i step_decay^i * (sum of step i's losses)
    step_loss_sums: Tensor  # [k] float32: cross entropies whatever the loss is, unweighted
    step_correct: Tensor  # [k] int64: supervised positions whose most likely draft is the target's
    step_counts: Tensor  # [k] int64: supervised positions; the first is what to normalise the loss by
    chain_accepted: Tensor  # [] int64: leading steps that are all right, summed over starts
    chain_starts: Tensor  # [] int64: columns whose first label is an answer token, in the draft vocabulary or not


def rollout(
    drafter: Eagle3Drafter,
    batch: PackedBatch,
    head: TargetHead,
    ttt_steps: int = 7,
    step_decay: float = 0.8,
    loss: Loss = "kl",
    columns_share: float = 1.0,
    generator: torch.Generator | None = None,
    published_mask: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Rollout:
    """Drafts and scores one packed batch; under `torch.no_grad` no gradient is prepared, for validation.

    `loss` is what the gradient is of: cross entropy, or the LK loss (see `eagle3_ray.drafter.loss`).
    With `columns_share` below 1, steps 1 and later run for a random share of the columns, drawn from `generator` (CPU),
    and their loss is scaled up to be unbiased; chains are counted from those columns only. The acceptance length of
    chains is 1 + chain_accepted / chain_starts. `published_mask` repeats the mask of the usual code, for comparison.

    Raises:
        ValueError: `ttt_steps` below 1 or `columns_share` outside (0, 1].
    """
    if ttt_steps < 1 or not 0 < columns_share <= 1:
        raise ValueError(f"ttt_steps {ttt_steps} must be 1 or more, columns_share {columns_share} in (0, 1].")
    taught = taught_tokens(batch.loss_mask, batch.cu_seqlens, published_mask)
    columns = query_columns(taught, batch.cu_seqlens, ttt_steps)
    if not columns.runs:
        return _nothing(drafter, ttt_steps)
    device = batch.input_ids.device
    labels = _Labels.of(drafter, batch, head, taught.to(device), compute_dtype)
    with torch.autocast(device.type, dtype=compute_dtype, enabled=compute_dtype != torch.float32):
        walk = _Walk(drafter, batch, head, columns, ttt_steps, compute_dtype)
        kept, kept_rows, factor = columns, None, 1.0
        normed, supervised, weights = [], [], []
        for step in range(ttt_steps):
            if step == 1 and columns_share < 1:
                kept, rows, factor = sample_columns(columns, batch.cu_seqlens, columns_share, generator)
                kept_rows = rows.to(device)
                walk.keep(kept, kept_rows)
            normed.append(walk.step(step))
            supervised.append(labels.at(kept, step))
            weights.append(step_decay**step * (factor if step else 1.0))
        rows = [in_vocabulary.nonzero()[:, 0] for _, _, in_vocabulary in supervised]
        teacher_rows = [labels.row[u[at]] for (u, _, _), at in zip(supervised, rows, strict=True)]
        scored = fused_loss(normed, rows, teacher_rows, weights, drafter.lm_head.weight, labels.teacher, loss)
    target_ids = drafter.target_ids()
    right = []
    for (u, _, in_vocabulary), at, drafts in zip(supervised, rows, scored.predicted, strict=True):
        hits = torch.zeros_like(in_vocabulary)
        hits[at] = target_ids[drafts] == labels.argmax[labels.row[u[at]]]
        right.append(hits)
    correct = torch.stack([hits.sum() for hits in right])
    starts = supervised[0][1]
    if kept_rows is not None:
        starts, right[0] = starts[kept_rows], right[0][kept_rows]
    chain = torch.stack(right).cumprod(0).sum(0)
    return Rollout(
        loss=scored.loss,
        step_loss_sums=torch.stack(scored.step_sums),
        step_correct=correct,
        step_counts=torch.tensor([len(at) for at in rows], device=device),
        chain_accepted=chain[starts].sum(),
        chain_starts=starts.sum(),
    )


@dataclass(frozen=True)
class _Labels:
    """What the target says after every taught token u."""

    taught: Tensor  # [T] bool
    row: Tensor  # [T] int64: u's row of the two below
    teacher: Tensor  # [m, Vd]
    argmax: Tensor  # [m] target ids
    in_vocabulary: Tensor  # [m] bool

    @classmethod
    def of(
        cls, drafter: Eagle3Drafter, batch: PackedBatch, head: TargetHead, taught: Tensor, dtype: torch.dtype
    ) -> "_Labels":
        at = taught.nonzero()[:, 0]
        last_hidden = batch.last_hidden[at].to(dtype)
        argmax = (
            greedy_tokens(last_hidden, head.lm_head.to(dtype))
            if batch.target_argmax is None
            else batch.target_argmax[at]
        )
        draft_rows = head.lm_head[drafter.target_ids()].to(dtype)
        row = taught.cumsum(0) - 1
        return cls(
            taught, row, teacher_probabilities(last_hidden, draft_rows, head.softcap), argmax, drafter.t2d[argmax]
        )

    def at(self, columns: Columns, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each column: u (clamped to the sequence), whether it is taught, and whether it has a label as well."""
        inside = columns.index + 1 + step < columns.end
        u = torch.minimum(columns.index + 1 + step, columns.end - 1).to(self.row.device)
        taught = inside.to(self.row.device) & self.taught[u]
        return u, taught, taught & self.in_vocabulary[self.row[u]]


class _Walk:
    """The steps' states: the drafter layer, and keys and values that later steps look back to."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        batch: PackedBatch,
        head: TargetHead,
        columns: Columns,
        steps: int,
        dtype: torch.dtype,
    ) -> None:
        self.drafter, self.columns, self.dtype = drafter, columns, dtype
        attention, hidden = drafter.midlayer.self_attn, drafter.config.hidden_size
        device = batch.input_ids.device
        query, key_value = attention.query_weight().to(dtype), attention.key_value_weight().to(dtype)
        self.query_weight, self.key_value_weight = query[:, hidden:], key_value[:, hidden:]
        embedded = drafter.midlayer.input_layernorm(head.embed_tokens[batch.input_ids].to(dtype))
        self.embedded_keys = F.linear(embedded, key_value[:, :hidden])
        reached = torch.zeros(len(batch.input_ids), dtype=torch.bool)
        for step in range(steps):
            reached[self._tokens(columns, step)] = True
        self.reached_row = (reached.cumsum(0) - 1).to(device)
        self.embedded_queries = F.linear(embedded[reached.to(device)], query[:, :hidden])

        fused = drafter.fuse(batch.aux_hidden[:-1].to(dtype))
        starts = torch.repeat_interleave(batch.cu_seqlens[:-1], batch.cu_seqlens.diff())
        positions = (torch.arange(len(starts)) - starts)[:-1].to(device)
        features = self.embedded_keys[1:] + F.linear(self._hidden_norm(fused), self.key_value_weight)
        self.keys, self.values = attention.keys_values(features, *drafter.rotations(positions))
        self.own: list[tuple[Tensor, Tensor]] = []
        self.state = fused[columns.index.to(device)]

    def keep(self, columns: Columns, rows: Tensor) -> None:
        """Goes on with some of the columns, between step 0 and step 1."""
        self.columns, self.state = columns, self.state[rows]

    def step(self, step: int) -> Tensor:
        """One step's post-norm states [n, H]; the state for the next step is kept."""
        drafter, layer, columns = self.drafter, self.drafter.midlayer, self.columns
        attention, device = layer.self_attn, self.state.device
        tokens = self._tokens(columns, step).to(device)
        cos, sin = drafter.rotations((columns.index - columns.start + step).to(device))
        normed = self._hidden_norm(self.state)
        features = self.embedded_queries[self.reached_row[tokens]] + F.linear(normed, self.query_weight)
        q = attention.queries(features, cos, sin)
        if step:
            features = self.embedded_keys[tokens] + F.linear(normed, self.key_value_weight)
            self.own.append(attention.keys_values(features, cos, sin))
        heads = chain_attention(q, self.keys, self.values, self.own, columns.runs, attention.scale)
        state = layer.after_attention(self.state, heads)
        out: Tensor = drafter.norm(state).to(self.dtype)
        self.state = out if drafter.config.norm_output else state
        return out

    def _hidden_norm(self, state: Tensor) -> Tensor:
        normed: Tensor = self.drafter.midlayer.hidden_norm(state).to(self.dtype)
        return normed

    @staticmethod
    def _tokens(columns: Columns, step: int) -> Tensor:
        """The token that each column embeds; past the end of the sequence any will do, for nothing learns from it."""
        return torch.minimum(columns.index + 1 + step, columns.end - 1)


def _nothing(drafter: Eagle3Drafter, steps: int) -> Rollout:
    """A batch without a label: a loss of zero that still reaches every parameter, as other workers expect."""
    loss = torch.stack([parameter.sum() * 0.0 for parameter in drafter.parameters()]).sum()
    zeros = torch.zeros(steps, dtype=torch.int64, device=loss.device)
    return Rollout(loss, zeros.float(), zeros, zeros, zeros[0], zeros[0])
