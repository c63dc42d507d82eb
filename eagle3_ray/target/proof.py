"""Proof, before the first sequence, that a target gives away the states that it should.

What proves what:

| wrong                                              | found by                                                        |
| -------------------------------------------------- | --------------------------------------------------------------- |
| pre-norm for post-norm, another head or model      | the engine's own log-probabilities                              |
| number or width of layers, chunked prefill, cache  | rows and widths of each capture, the same sequence twice        |
| rows or sequences of a batch swapped               | captured alone, in a pair, and in the other order               |
| one layer twice, the last state for a layer        | the states differ from each other                               |
| a layer off by one                                 | a second route (`second_route`), given as `reference`           |

Without `reference`, a target that names other layers than asked goes unnoticed as long as its three layers differ.
"""

import warnings
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_ray.model_config import AUX_LAYERS
from eagle3_ray.target.model import load_model
from eagle3_ray.target.on_policy import OnPolicyLimits, on_policy
from eagle3_ray.target.protocol import CaptureError, States, Target, TargetParts, TokenSequence, relative_error

SAME = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Relative error of the middle row below which two routes to a state agree."""


class SelfCheckFailed(CaptureError):
    """The target gives away other states than it should; nothing captured with it may train."""


def self_check(
    target: Target,
    parts: TargetParts,
    sequence: TokenSequence,
    engine_logprobs: Any,
    *,
    temperature: float = 1.0,
    reference: States | None = None,
    limits: OnPolicyLimits | None = None,
) -> None:
    """Captures `sequence` alone, with another and again, and holds the states against all that is known of them.

    `engine_logprobs` are the engine's own of the last len(engine_logprobs) tokens: those recorded with an answer drawn
    at `temperature`, or `SGLangTarget.logprobs` (1). None leaves the head unproved and says so with a warning.
    `reference` holds the same sequence's states of another route.

    Raises:
        SelfCheckFailed: says what is wrong.
    """
    other = TokenSequence(f"{sequence.sequence_id}, reversed", np.ascontiguousarray(sequence.ids[::-1]), 0)
    [alone] = _capture(target, [sequence], parts)
    [again] = _capture(target, [sequence], parts)
    first, beside = _capture(target, [sequence, other], parts)
    _, second = _capture(target, [other, sequence], parts)
    for what, states in (
        ("a second time", again),
        ("before another sequence", first),
        ("behind another sequence", second),
    ):
        _same(alone, states, f"captured {what}, the probe has other states", parts)
    if relative_error(alone.last_hidden, beside.last_hidden) < SAME[alone.last_hidden.dtype]:
        raise SelfCheckFailed("Two different sequences have the same states: a batch hands out one for all.")
    _different(target.layers, alone, parts)
    if engine_logprobs is None:
        warnings.warn("No log-probabilities of the engine are at hand: the output head is not proved.", stacklevel=2)
    else:
        answer = TokenSequence(sequence.sequence_id, sequence.ids, len(sequence.ids) - len(engine_logprobs))
        score = on_policy(alone, answer, engine_logprobs, parts, temperature=temperature)
        reason = (limits or OnPolicyLimits()).reason(score)
        if reason is not None:
            raise SelfCheckFailed(
                f"Sequence {sequence.sequence_id}: lm_head(last_hidden) does not give the engine's log-probabilities "
                f"({reason}). The state is not behind the final norm, or head and engine are of different models."
            )
    if reference is not None:
        _same(reference, alone, f"of the layers {target.layers}, a second route finds other states", parts)


def second_route(
    folder: Path, layers: Sequence[int], sequence: TokenSequence, dtype: torch.dtype, trust_remote_code: bool = False
) -> States:
    """The same states from transformers' own `output_hidden_states`, on the CPU. Loads the whole model: once a run."""
    model = load_model(folder, dtype, trust_remote_code).get_decoder().eval()
    with torch.no_grad():
        out = model(torch.from_numpy(sequence.ids).long()[None], output_hidden_states=True, use_cache=False)
    aux = torch.cat([out.hidden_states[layer][0] for layer in layers], dim=-1)
    return States(sequence.sequence_id, aux, out.last_hidden_state[0])


def _capture(target: Target, sequences: Sequence[TokenSequence], parts: TargetParts) -> list[States]:
    found = target.capture(sequences)
    if len(found) != len(sequences):
        raise SelfCheckFailed(f"{len(sequences)} sequences were sent, {len(found)} came back.")
    for sequence, states in zip(sequences, found, strict=True):
        try:
            states.check(sequence, len(parts.norm), states.last_hidden.dtype)
        except CaptureError as error:
            raise SelfCheckFailed(str(error)) from None
    return found


def _same(expected: States, found: States, complaint: str, parts: TargetParts) -> None:
    pairs = zip(_by_layer(expected, parts), _by_layer(found, parts), strict=True)
    errors = [relative_error(*pair) for pair in pairs]
    limit = SAME[found.last_hidden.dtype]
    if max(errors) > limit:
        raise SelfCheckFailed(
            f"Sequence {expected.sequence_id}: {complaint} (relative errors of the three layers and the last state "
            f"{', '.join(f'{error:.2g}' for error in errors)}, limit {limit:g}). Check the engine's version and the "
            "layers asked for."
        )


def _different(layers: Sequence[int], states: States, parts: TargetParts) -> None:
    names = [*(f"layer {layer}" for layer in layers), "the last state"]
    for (a, left), (b, right) in combinations(zip(names, _by_layer(states, parts), strict=True), 2):
        if relative_error(left, right) < SAME[states.last_hidden.dtype]:
            raise SelfCheckFailed(f"The states of {a} and {b} are the same: the engine captures one of them twice.")


def _by_layer(states: States, parts: TargetParts) -> list[torch.Tensor]:
    return [*states.aux_hidden.split(len(parts.norm), dim=1)[:AUX_LAYERS], states.last_hidden]
