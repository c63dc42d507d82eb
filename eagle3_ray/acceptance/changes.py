"""The ways to read a drafter wrongly: each as one change to the drafter, or to the states that it is given.

Each is something that was seen to go wrong between a training and a serving stack. A change that lifts the replayed
acceptance sharply says what is wrong, because the drafter was trained the other way.
"""

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3_ray.acceptance.replay import first_drafts
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.norm import RMSNorm
from eagle3_ray.drafter.rope import rope_frequencies
from eagle3_ray.model_config import rope_theta
from eagle3_ray.target.protocol import States, TokenSequence

Recorded = Sequence[tuple[TokenSequence, States]]
"""Greedy answers with the target's states."""


@dataclass(frozen=True)
class Evidence:
    """What a diagnosis is made from.

    `at_layers` gives greedy answers of the served target (some are enough), always the same ones, with its states at
    the layers that are asked for.
    """

    target_config: Mapping[str, Any]  # of the language model
    embed_tokens: Tensor  # [V, H]
    at_layers: Callable[[tuple[int, ...]], Recorded]
    steps: int


@dataclass(frozen=True)
class Change:
    """One other reading: `drafter` replayed on `recorded`, held against the unchanged one on `judged_by`."""

    cause: str
    what: str
    remedy: str
    drafter: Eagle3Drafter
    recorded: Recorded
    judged_by: Recorded


def changes(drafter: Eagle3Drafter, evidence: Evidence, recorded: Recorded) -> Iterator[Change]:
    """All changes, one at a time; `recorded` has the states of the layers that the drafter names."""
    yield from _orders(drafter, recorded)
    yield from _neighbours(drafter, evidence, recorded)
    for cause, what, remedy, changed in [*_flags(drafter), *_ropes(drafter, evidence), _absolute_ids(drafter)]:
        yield Change(cause, what, remedy, changed, recorded, recorded)
    yield _learned_map(drafter, evidence, recorded)


def _orders(drafter: Eagle3Drafter, recorded: Recorded) -> Iterator[Change]:
    layers = drafter.config.aux_layers
    for order in itertools.permutations(range(len(layers))):
        if order != tuple(range(len(layers))):
            reordered = [
                (sequence, replace(states, aux_hidden=_reordered(states.aux_hidden, order)))
                for sequence, states in recorded
            ]
            what = f"Giving fc the layers in the order {[layers[i] for i in order]} instead of {list(layers)}"
            remedy = "Export the drafter with the layers in the order that training captured them in."
            yield Change("layer ids", what, remedy, drafter, reordered, recorded)


def _reordered(aux_hidden: Tensor, order: Sequence[int]) -> Tensor:
    thirds = aux_hidden.chunk(len(order), dim=-1)
    return torch.cat([thirds[i] for i in order], dim=-1)


def _neighbours(drafter: Eagle3Drafter, evidence: Evidence, recorded: Recorded) -> Iterator[Change]:
    layers = drafter.config.aux_layers
    for shift in (-1, 1):
        shifted = tuple(layer + shift for layer in layers)
        if min(shifted) >= 1 and max(shifted) < int(evidence.target_config["num_hidden_layers"]):
            what = f"Capturing layers {list(shifted)} instead of {list(layers)}"
            remedy = "The layers were named in another engine's convention; ours are HF hidden_states indices."
            yield Change("layer ids", what, remedy, drafter, evidence.at_layers(shifted), recorded)


_Reading = tuple[str, str, str, Eagle3Drafter]


def _flags(drafter: Eagle3Drafter) -> Iterator[_Reading]:
    config = drafter.config
    remedy = "Set it so in config.json, and serve with what it was trained with."
    what = f"norm_output {str(not config.norm_output).lower()} instead of {str(config.norm_output).lower()}"
    yield "norm_output", what, remedy, _with_config(drafter, norm_output=not config.norm_output)
    changed = _with_config(drafter, fc_norm=not config.fc_norm)
    if changed.config.fc_norm:
        changed.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.aux_layers)
    what = f"fc_norm {str(not config.fc_norm).lower()} instead of {str(config.fc_norm).lower()}"
    yield "fc_norm", what, remedy, changed


def _ropes(drafter: Eagle3Drafter, evidence: Evidence) -> Iterator[_Reading]:
    config = drafter.config
    ours, target = float(config.rope["rope_theta"]), rope_theta(evidence.target_config)
    for theta in sorted({10000.0, target or 10000.0} - {ours}):
        rope = {**config.rope, "rope_theta": theta}
        changed = _with_config(drafter, rope=rope)
        frequencies, changed.rope_factor = rope_frequencies(rope, config.rope_dim, config.max_position_embeddings)
        changed.frequencies = frequencies.to(drafter.frequencies)
        remedy = "Write the RoPE fields that the drafter was trained with into config.json."
        yield "rope", f"rope_theta {theta:g} instead of {ours:g}", remedy, changed


def _absolute_ids(drafter: Eagle3Drafter) -> _Reading:
    changed = _with_ids(drafter, drafter.d2t.clamp(0, drafter.config.vocab_size - 1))
    return "vocabulary map", "Reading d2t as absolute ids", "Write d2t as offsets, target id - i.", changed


def _learned_map(drafter: Eagle3Drafter, evidence: Evidence, recorded: Recorded) -> Change:
    """Learns from every other answer what each draft token means; the rest of the answers judge it."""
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for sequence, states in recorded[::2]:
        ids, first = torch.from_numpy(sequence.ids).long(), sequence.prompt_tokens
        drafts = first_drafts(drafter, evidence.embed_tokens, states.aux_hidden, ids, first)
        for draft, label in zip(drafts, ids[first + 1 :].tolist(), strict=True):
            seen[draft][label] += 1
    learned = drafter.target_ids().clone()
    for draft, labels in seen.items():
        learned[draft] = labels.most_common(1)[0][0]
    others = recorded[1::2]
    what = "Reading each draft token as the target token that mostly follows where it is drafted"
    remedy = "d2t is not the map of lm_head's rows: inherit it at warm start and export it with the weights."
    return Change("vocabulary map", what, remedy, _with_ids(drafter, learned), others, others)


def _with_config(drafter: Eagle3Drafter, **fields: Any) -> Eagle3Drafter:
    """The same weights under another config."""
    changed = copy.copy(drafter)
    changed._modules, changed._buffers = dict(drafter._modules), dict(drafter._buffers)
    changed.config = replace(drafter.config, **fields)
    return changed


def _with_ids(drafter: Eagle3Drafter, target_ids: Tensor) -> Eagle3Drafter:
    changed = _with_config(drafter)
    changed.d2t = target_ids - torch.arange(len(target_ids), device=target_ids.device)
    return changed
