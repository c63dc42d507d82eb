# mypy: allow-subclassing-any, allow-untyped-decorators
"""Drafting one chain as SGLang does, in plain steps: the reference for evaluation, and for the fast rollout's tests.

It computes every column of the context again for each chain; nothing here is made for speed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3_ray.drafter.model import Eagle3Drafter


def most_likely(logits: Tensor) -> int:
    """The draft token (index into the draft vocabulary) of the highest logit."""
    return int(logits.argmax())


@torch.no_grad()
def propose(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,
    aux_hidden: Tensor,
    input_ids: Tensor,
    steps: int,
    choose: Callable[[Tensor], int] = most_likely,
) -> tuple[list[int], Tensor]:
    """Drafts the tokens P+1 .. P+steps after `input_ids` [P + 1], the last of which is verified but has no state yet.

    Column p embeds token p+1 beside the target's `aux_hidden` [P, 3H] of position p; the chain goes on from the last
    column. `choose` takes the logits [draft vocabulary] of one step and gives an index into them.

    Returns:
        The drafts in the target's vocabulary, and the logits [steps, draft vocabulary] in float32.

    Raises:
        ValueError: `input_ids` is not one longer than `aux_hidden`.
    """
    columns = aux_hidden.shape[0]
    if input_ids.shape[0] != columns + 1 or columns == 0:
        raise ValueError(
            f"input_ids has {input_ids.shape[0]} tokens for {columns} aux_hidden rows: it must have one more, "
            "the verified token whose state is not known."
        )
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    target_ids = drafter.target_ids()
    dtype = drafter.fc.weight.dtype
    h = drafter.fuse(aux_hidden.to(dtype))
    embedded = embed_tokens[input_ids[1:].to(embed_tokens.device)].to(dtype)
    positions = torch.arange(columns, device=h.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    drafts: list[int] = []
    logits: list[Tensor] = []
    for step in range(steps):
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(h)), dim=-1)
        cos, sin = drafter.rotations(positions)
        k, v = attention.keys_values(x @ attention.key_value_weight().T, cos, sin)
        keys.append(k)
        values.append(v)
        q = attention.queries(x[-1:] @ attention.query_weight().T, cos[-1:], sin[-1:])
        scores = torch.einsum("qhd,khd->hqk", q.float(), torch.cat(keys).float()) * attention.scale
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), torch.cat(values).float()).to(dtype)
        h = layer.after_attention(h[-1:], attended)
        normed = drafter.norm(h)
        logits.append(drafter.lm_head(normed)[0].float())
        drafts.append(int(target_ids[choose(logits[-1])]))
        if drafter.config.norm_output:
            h = normed
        embedded = embed_tokens[drafts[-1]][None].to(dtype)
        positions = torch.tensor([columns + step], device=h.device)
    return drafts, torch.stack(logits)
