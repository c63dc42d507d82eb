"""The acceptance length: one formula for the engine, the reference decoder and the replay of recorded answers.

An answer's first token comes out of the prefill. Every further token comes out of a verify step: one target forward
over the newest token and the drafts behind it, which yields the drafts that it accepts and one token of its own. So

    acceptance_length = (answer tokens - answers) / verify steps        pooled over all answers, never a mean of means

It is 1.0 where no draft is ever accepted. Two other figures are near it and are not it: SGLang's `spec_accept_length`
(answer tokens / verify steps of one request) counts the prefill's token too, and 1 + mean accepted drafts counts
drafts that the last step accepted behind the end of the answer. (A request that SGLang retracts for lack of room is
prefilled once more for each time; those tokens are not counted either.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

PLAIN = "none"
"""The name, among drafters, of the engine without one."""
EVERYTHING, WITHOUT_LOOPS = "all", "without loops"
"""Groups that an evaluation pools all answers in, beside each dataset's own; no dataset may be called so."""
VALIDATION_STEPS = 5
"""Drafts of the chains that training's acceptance length is about, as many as are served by default."""


@dataclass(frozen=True)
class Acceptance:
    """Pooled counts. `histogram[n]` is the number of verify steps that accepted n drafts."""

    answers: int = 0
    tokens: int = 0  # that verify steps yielded: all answer tokens but the first of each answer
    verify_steps: int = 0
    histogram: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sum(self.histogram) != self.verify_steps:
            raise ValueError(f"the histogram counts {sum(self.histogram)} verify steps, there were {self.verify_steps}")
        if not self.verify_steps <= self.tokens <= self.verify_steps + self.accepted_drafts:
            raise ValueError(
                f"{self.verify_steps} verify steps that accepted {self.accepted_drafts} drafts cannot have yielded "
                f"{self.tokens} tokens"
            )

    @property
    def accepted_drafts(self) -> int:
        """Drafts that the target agreed with, those behind an answer's end included."""
        return sum(n * steps for n, steps in enumerate(self.histogram))

    @property
    def length(self) -> float | None:
        """The acceptance length; None where no verify step was needed."""
        return self.tokens / self.verify_steps if self.verify_steps else None

    def __add__(self, other: "Acceptance") -> "Acceptance":
        both = zip_longest(self.histogram, other.histogram, fillvalue=0)
        return Acceptance(
            self.answers + other.answers,
            self.tokens + other.tokens,
            self.verify_steps + other.verify_steps,
            tuple(a + b for a, b in both),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": None if self.length is None else round(self.length, 4),
            "answers": self.answers,
            "tokens": self.tokens,
            "verify_steps": self.verify_steps,
            "histogram": list(self.histogram),
        }


def of_answer(answer_tokens: int, accepted: Sequence[int]) -> Acceptance:
    """The counts of one answer of `answer_tokens` tokens, whose verify steps accepted so many drafts each."""
    histogram = [0] * (max(accepted, default=-1) + 1)
    for n in accepted:
        histogram[n] += 1
    return Acceptance(1, answer_tokens - 1, len(accepted), tuple(histogram))


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """All counts added up."""
    return sum(parts, Acceptance())
