"""What makes an answer fit to train on: of each row by itself, and of a partition as a whole.

A row with a fatal finding is rejected with its reason. A finding about a partition stops the job while it is cheap: an
answer boundary that never comes says that a server strips it, whatever its flags claim.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_LONGEST_PERIOD = 32
_PROMPT_TAIL = 8  # tokens at a prompt's end in which a template closes an empty reasoning block

VARYING = r"""\B'[^']*'|\B"[^"]*"|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?"""
"""What differs between two reasons of one kind, numbers and quoted words, as Python and DuckDB both read it."""


def kind_of(reason: str) -> str:
    """A reason without what is of one row only, so that reasons can be counted."""
    return re.sub(VARYING, "N", reason)


@dataclass(frozen=True)
class AuditRules:
    """Token ids and limits, from the target's files and the `audit` section."""

    stop_ids: frozenset[int]
    special_ids: frozenset[int]
    boundary_ids: frozenset[int]
    loop_tokens: int
    evidence_rows: int


def judge(output_ids: Sequence[int], has_tools: bool, rules: AuditRules) -> str | None:
    """Why the answer is not fit to train on, None where it is.

    Calls of tools are written with special tokens, so these are looked for only where the prompt has no tools.
    """
    body = output_ids[:-1] if output_ids and output_ids[-1] in rules.stop_ids else output_ids
    if not body:
        return "empty answer"
    if not has_tools:
        allowed = rules.stop_ids | rules.boundary_ids
        for position, token in enumerate(body):
            if token in rules.special_ids and token not in allowed:
                return f"special token {token} inside the answer, at position {position}"
    repeated = loop_length(body)
    if repeated >= rules.loop_tokens:
        return f"the answer ends in a loop of {repeated} tokens"
    return None


def boundary_due(prompt_ids: Sequence[int], rules: AuditRules) -> bool:
    """Whether the answer still has to pass a boundary: there are some, and the template did not close one itself."""
    return bool(rules.boundary_ids) and rules.boundary_ids.isdisjoint(prompt_ids[-_PROMPT_TAIL:])


def cut_in_reasoning(
    prompt_ids: Sequence[int], output_ids: Sequence[int], finish_reason: str, rules: AuditRules
) -> bool:
    """Whether the answer reached its length before its reasoning ended."""
    return finish_reason == "length" and boundary_due(prompt_ids, rules) and rules.boundary_ids.isdisjoint(output_ids)


def loop_length(ids: Sequence[int]) -> int:
    """Tokens at the end that repeat what stands one period before them, for the period that gives most.

    At least three repetitions count; periods up to 32 tokens. 0 where nothing loops.
    """
    longest = 0
    for period in range(1, min(_LONGEST_PERIOD, len(ids) // 3) + 1):
        same = 0
        for position in range(len(ids) - 1, period - 1, -1):
            if ids[position] != ids[position - period]:
                break
            same += 1
        if same >= 2 * period:
            longest = max(longest, same + period)
    return longest


@dataclass
class Evidence:
    """Counts of one partition, added up over actors, until they allow a verdict."""

    rows: int = 0
    boundary_due: int = 0
    boundary_seen: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], stopped: bool, reason: str | None, rules: AuditRules
    ) -> None:
        """Counts one answer. A boundary is due where the answer is whole and the prompt did not bring it along."""
        self.rows += 1
        if reason is not None:
            self.reasons[kind_of(reason)] += 1
        if stopped and boundary_due(prompt_ids, rules):
            self.boundary_due += 1
            self.boundary_seen += not rules.boundary_ids.isdisjoint(output_ids)

    def merge(self, other: "Evidence") -> None:
        self.rows += other.rows
        self.boundary_due += other.boundary_due
        self.boundary_seen += other.boundary_seen
        self.reasons.update(other.reasons)

    def finding(self, partition: str, rules: AuditRules) -> str | None:
        """Why the whole partition is not fit to train on, None where it is or where it is too early to say."""
        if self.boundary_due >= rules.evidence_rows and self.boundary_seen == 0:
            return (
                f"Partition {partition}: none of {self.boundary_due} whole answers holds a boundary token "
                f"{sorted(rules.boundary_ids)} (audit.boundary_ids). Something strips it, or the target has none."
            )
        rejected = sum(self.reasons.values())
        if self.rows >= rules.evidence_rows and rejected > 0.5 * self.rows:
            common, count = self.reasons.most_common(1)[0]
            return (
                f"Partition {partition}: {rejected} of {self.rows} answers are not fit to train on, {count} of them: "
                f"{common}. Look at them with `python jobs/doctor.py RUN`."
            )
        return None
