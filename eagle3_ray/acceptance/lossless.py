"""Does the drafter change the answer? Greedy output with it has to equal greedy output without it, token for token.

Speculative decoding is lossless in exact arithmetic. In float32 it is so in practice; in bfloat16 a verify step's
batch has another shape than a plain step's, so two tokens whose logits are nearly equal may change places. Each
difference is therefore shown with the gap between its two tokens, which the target itself is asked for.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from eagle3_ray.acceptance.engine import EngineFailed, Served
from eagle3_ray.sglang.protocol import RequestFailed
from eagle3_ray.sglang.transport import ask

NEAR_TIE = 0.25
"""Nats. Two bfloat16 steps of a logit between 16 and 32, the size that logits have at their largest."""


@dataclass(frozen=True)
class Mismatch:
    """Where an answer first differs: `plain` and `drafted` are the two tokens at `position`, None behind an end.

    `gap` is how much likelier the target finds its own token `plain`, in nats; None where there is no second token.
    """

    name: str
    position: int
    plain: int | None
    drafted: int | None
    gap: float | None

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and abs(self.gap) <= NEAR_TIE


@dataclass(frozen=True)
class Lossless:
    """How many answers were compared, and those that differ."""

    answers: int
    mismatches: tuple[Mismatch, ...]

    @property
    def equal(self) -> int:
        return self.answers - len(self.mismatches)

    @property
    def unexplained(self) -> list[Mismatch]:
        """Differences that are no near tie: the drafter, or the engine, changed what the target says."""
        return [mismatch for mismatch in self.mismatches if not mismatch.near_tie]

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "equal": self.equal,
            "unexplained": len(self.unexplained),
            "mismatches": [{**asdict(one), "near_tie": one.near_tie} for one in self.mismatches],
        }


def compare(plain: Sequence[Served], drafted: Sequence[Served], url: str, api_key: str | None = None) -> Lossless:
    """Compares the greedy answers of two engines to the same prompts; asks the one at `url` for the gaps.

    Raises:
        ValueError: the two did not answer the same prompts.
        EngineFailed: the engine does not answer.
    """
    mismatches = []
    for ours, theirs in zip(plain, drafted, strict=True):
        if ours.prompt != theirs.prompt:
            raise ValueError(f"{ours.prompt.name} and {theirs.prompt.name} are answers to different prompts")
        position = first_difference(ours.output_ids, theirs.output_ids)
        if position is not None:
            a, b = (ids[position] if position < len(ids) else None for ids in (ours.output_ids, theirs.output_ids))
            prefix = [*ours.prompt.prompt_ids, *ours.output_ids[:position]]
            gap = None if a is None or b is None else token_gap(url, prefix, a, b, api_key)
            mismatches.append(Mismatch(ours.prompt.name, position, a, b, gap))
    return Lossless(len(plain), tuple(mismatches))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where the two differ, the end of the shorter one included; None where they are equal."""
    return next((at for at, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def token_gap(url: str, prefix: Sequence[int], a: int, b: int, api_key: str | None = None) -> float:
    """log p(a) - log p(b) behind `prefix`. One token is a prefill: an engine with a drafter answers without it."""
    body = {
        "input_ids": list(prefix),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "token_ids_logprob": [a, b],
    }
    try:
        answer = ask(f"{url}/generate", body, api_key, timeout_s=600)
        [pairs] = answer["meta_info"]["output_token_ids_logprobs"]
        logprobs = {token: float(logprob) for logprob, token, *_ in pairs}
        return logprobs[a] - logprobs[b]
    except RequestFailed as error:
        raise EngineFailed(f"{url} does not tell the log-probabilities of a mismatch: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFailed(f"{url}: output_token_ids_logprobs is not as sglang 0.5.23 gives it: {error}") from None
