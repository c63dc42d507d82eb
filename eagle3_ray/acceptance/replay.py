"""Chain acceptance of recorded answers: what decoding them would have taken, without decoding.

Greedy decoding with a drafter walks through an answer that is known beforehand. Where its newest token is t, it drafts
a chain and goes on behind the leading drafts that are the answer's own tokens and the one token of the target itself.
A draft only counts if all before it were right, so the chain may as well be fed the answer's tokens: every start is
then computed at once, in one pass of the drafter a step. The number of verify steps is exactly that of real decoding,
if the states are the target's and the answer is its greedy one.

Validation during training pools over all starts instead of those that decoding comes by. The two differ because
decoding does not begin a chain inside another one that was right: validation was 2 to 12% above, on answers of SmolLM2.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from eagle3_ray.acceptance.tally import Acceptance, of_answer, pool
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.target.protocol import States, TokenSequence

_QUERIES = 256  # columns that are scored at once: bounds the score matrix to [heads, 256, T]


def replay(
    drafter: Eagle3Drafter, embed_tokens: Tensor, recorded: Iterable[tuple[TokenSequence, States]], steps: int
) -> Acceptance:
    """The verify steps of decoding recorded answers with `steps` drafts to a step.

    Args:
        embed_tokens: the target's embedding [V, H].
        recorded: sequences (prompt and answer) with the target's states of the same tokens.
    """
    answers = []
    for sequence, states in recorded:
        ids = torch.tensor(sequence.ids, dtype=torch.int64)
        matches = matched_drafts(drafter, embed_tokens, states.aux_hidden, ids, steps, sequence.prompt_tokens)
        answers.append(of_answer(len(ids) - sequence.prompt_tokens, walk(matches)))
    return pool(answers)


def walk(matches: Sequence[int]) -> list[int]:
    """The accepted drafts of each verify step; `matches[i]` are those that a chain would have behind answer token i.

    The prefill gives answer token 0. A step at token i goes on at token i + matches[i] + 1.
    """
    accepted, at = [], 0
    while at < len(matches):
        accepted.append(matches[at])
        at += matches[at] + 1
    return accepted


def matched_drafts(
    drafter: Eagle3Drafter, embed_tokens: Tensor, aux_hidden: Tensor, input_ids: Tensor, steps: int, first: int
) -> list[int]:
    """The leading drafts that equal the recorded tokens, for a chain behind each of the tokens first .. T - 2.

    Args:
        aux_hidden: [T, 3H], a row for each of the T `input_ids`; the last one is not needed.
        first: index of the first answer token, at least 1; the chain behind it needs the states of the prompt only.

    Raises:
        ValueError: the rows are not those of the tokens.
    """
    with torch.inference_mode():
        columns, blocks = _prepare(drafter, embed_tokens, aux_hidden, input_ids, first)
        return [int(n) for block in blocks for n in columns.matched(block, steps)]


def first_drafts(
    drafter: Eagle3Drafter, embed_tokens: Tensor, aux_hidden: Tensor, input_ids: Tensor, first: int
) -> list[int]:
    """The first draft of each chain of `matched_drafts`, as an index into the draft vocabulary."""
    with torch.inference_mode():
        columns, blocks = _prepare(drafter, embed_tokens, aux_hidden, input_ids, first)
        return [int(n) for block in blocks for n in next(columns.drafts(block, 1))]


def _prepare(
    drafter: Eagle3Drafter, embed_tokens: Tensor, aux_hidden: Tensor, input_ids: Tensor, first: int
) -> tuple["_Columns", list[Tensor]]:
    """The columns, and blocks of those whose chains count: column p is the chain behind token p + 1."""
    tokens = input_ids.shape[0]
    if aux_hidden.shape[0] != tokens:
        raise ValueError(f"aux_hidden has {aux_hidden.shape[0]} rows for {tokens} tokens: it must have one for each.")
    if first < 1:
        raise ValueError(f"first={first}: the first drafted chain needs at least one token before the answer.")
    dtype, device = drafter.fc.weight.dtype, drafter.fc.weight.device
    columns = _Columns(drafter, embed_tokens, aux_hidden[:-1].to(device, dtype), input_ids.to(device))
    return columns, list(torch.arange(first - 1, max(first - 1, tokens - 2), device=device).split(_QUERIES))


class _Columns:
    """Step 0's keys and values of all columns. Column p embeds token p + 1 beside the state of token p."""

    def __init__(self, drafter: Eagle3Drafter, embed_tokens: Tensor, aux_hidden: Tensor, input_ids: Tensor) -> None:
        self._drafter = drafter
        self._embed_tokens = embed_tokens
        self._ids = input_ids
        self._states = drafter.fuse(aux_hidden)
        positions = torch.arange(len(aux_hidden), device=aux_hidden.device)
        self._positions = positions
        inputs = self._inputs(positions, self._states, 0)
        layer = drafter.midlayer.self_attn
        self._keys, self._values = layer.keys_values(inputs @ layer.key_value_weight().T, *drafter.rotations(positions))

    def _inputs(self, columns: Tensor, states: Tensor, step: int) -> Tensor:
        layer = self._drafter.midlayer
        ids = self._ids[(columns + 1 + step).clamp(max=len(self._ids) - 1)]
        embedded = self._embed_tokens[ids.to(self._embed_tokens.device)].to(states)
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(states)), dim=-1)

    def drafts(self, columns: Tensor, steps: int) -> Iterator[Tensor]:
        """The drafts of each step, as indices into the draft vocabulary [Q], for the chains of these columns."""
        drafter, attention = self._drafter, self._drafter.midlayer.self_attn
        states = self._states[columns]
        later = self._positions[None] > columns[:, None]  # [Q, C]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for step in range(steps):
            inputs = self._inputs(columns, states, step)
            rotations = drafter.rotations(columns + step)
            if step > 0:
                k, v = attention.keys_values(inputs @ attention.key_value_weight().T, *rotations)
                own_keys.append(k)
                own_values.append(v)
            q = attention.queries(inputs @ attention.query_weight().T, *rotations).float()
            scores = torch.einsum("qhd,khd->hqk", q, self._keys.float()).masked_fill(later, -torch.inf)
            own = [torch.einsum("qhd,qhd->hq", q, k.float())[..., None] for k in own_keys]
            weights = (torch.cat([scores, *own], dim=-1) * attention.scale).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights[..., : len(self._positions)], self._values.float())
            for at, v in enumerate(own_values, start=len(self._positions)):
                attended = attended + weights[..., at].T[..., None] * v.float()
            states = drafter.midlayer.after_attention(states, attended.to(states))
            normed = drafter.norm(states)
            yield drafter.lm_head(normed).argmax(-1)
            if drafter.config.norm_output:
                states = normed

    def matched(self, columns: Tensor, steps: int) -> Tensor:
        """Leading matches of the chains of these columns, int64 [Q]."""
        target_ids = self._drafter.target_ids()
        right = torch.ones(len(columns), dtype=torch.bool, device=columns.device)
        matches = torch.zeros(len(columns), dtype=torch.int64, device=columns.device)
        for step, drafts in enumerate(self.drafts(columns, steps)):
            label = columns + 2 + step
            known = self._ids[label.clamp(max=len(self._ids) - 1)]
            right &= (label < len(self._ids)) & (target_ids[drafts] == known)
            matches += right
        return matches
