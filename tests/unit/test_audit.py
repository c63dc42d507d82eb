"""The verdict on an answer and on a partition, on cases that were counted by hand or by a slower independent way."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_ray.audit import (
    VARYING,
    AuditRules,
    Evidence,
    cut_in_reasoning,
    judge,
    kind_of,
    loop_length,
)
from eagle3_ray.ledger import report
from eagle3_ray.prompts import BadPrompt, parse
from eagle3_ray.records import SEQUENCE_SCHEMA

STOP, OTHER_STOP, END_THINK, IM_START = 2, 3, 4, 1
RULES = AuditRules(
    stop_ids=frozenset({STOP, OTHER_STOP}),
    special_ids=frozenset({IM_START, STOP, OTHER_STOP, END_THINK}),
    boundary_ids=frozenset({END_THINK}),
    loop_tokens=12,
    evidence_rows=10,
)
NO_BOUNDARY = AuditRules(RULES.stop_ids, RULES.special_ids, frozenset(), 12, 10)


@pytest.mark.parametrize(
    "output_ids",
    [
        [10, 11, 12, STOP],
        [10, 11, OTHER_STOP],
        [10],
        [10, END_THINK, 11, STOP],
        list(range(10, 500)),
        [10, 11] * 5 + [STOP],  # 10 tokens of a loop, 12 are too many
    ],
)
def test_a_good_answer_has_no_reason(output_ids: list[int]) -> None:
    assert judge(output_ids, False, RULES) is None


@pytest.mark.parametrize("output_ids", [[], [STOP], [OTHER_STOP]])
def test_an_answer_of_nothing_but_a_stop_is_empty(output_ids: list[int]) -> None:
    assert judge(output_ids, False, RULES) == "empty answer"


def test_a_special_token_inside_an_answer_is_named_with_its_place() -> None:
    reason = "special token 1 inside the answer, at position 2"
    assert judge([10, 11, IM_START, 12, STOP], False, RULES) == reason
    assert judge([10, 11, IM_START], False, RULES) == reason


def test_special_tokens_belong_into_answers_to_prompts_with_tools() -> None:
    assert judge([10, 11, IM_START, 12, STOP], True, RULES) is None


def test_an_end_of_thinking_token_is_allowed_only_where_it_is_the_boundary() -> None:
    assert judge([10, END_THINK, 11, STOP], False, NO_BOUNDARY) == "special token 4 inside the answer, at position 1"


@pytest.mark.parametrize("end", [[], [STOP]])
@pytest.mark.parametrize(("period", "repeats"), [(1, 12), (2, 6), (3, 4), (4, 3), (32, 3)])
def test_an_answer_that_ends_in_a_loop_is_not_fit(period: int, repeats: int, end: list[int]) -> None:
    body = [7, 8, 9] + list(range(100, 100 + period)) * repeats
    assert judge(body + end, False, RULES) == f"the answer ends in a loop of {period * repeats} tokens"


def test_a_loop_that_the_answer_gets_out_of_is_fit() -> None:
    assert judge([10] * 40 + [11, STOP], False, RULES) is None


def _loop_by_definition(ids: list[int]) -> int:
    """The longest tail that has a period of at most 32 and holds it three times."""
    longest = 0
    for start in range(len(ids)):
        tail = ids[start:]
        for period in range(1, 33):
            if len(tail) >= 3 * period and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
                longest = max(longest, len(tail))
    return longest


@pytest.mark.parametrize("seed", range(30))
def test_a_loop_is_as_long_as_its_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    head = [rng.randrange(3) for _ in range(rng.randrange(12))]
    unit = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
    ids = head + unit * rng.randrange(1, 6) + unit[: rng.randrange(len(unit))]
    assert loop_length(ids) == _loop_by_definition(ids)


def test_periods_over_32_and_two_repetitions_are_no_loop() -> None:
    assert loop_length(list(range(33)) * 5) == 0
    assert loop_length([1, 2, 3, 4] * 2) == 0
    assert loop_length([]) == 0


def _evidence(
    rows: int, seen: int, rules: AuditRules = RULES, stopped: bool = True, prompt: tuple[int, ...] = (5, 6)
) -> Evidence:
    evidence = Evidence()
    for row in range(rows):
        output = [10, END_THINK, 11, STOP] if row < seen else [10, 11, STOP]
        evidence.add(prompt, output, stopped, None, rules)
    return evidence


def test_a_partition_without_any_boundary_is_stopped_when_there_is_enough_evidence() -> None:
    assert _evidence(9, 0).finding("B1", RULES) is None
    finding = _evidence(10, 0).finding("B1", RULES)
    assert finding is not None
    for part in ("Partition B1", "none of 10 whole answers", "[4]", "audit.boundary_ids"):
        assert part in finding


@pytest.mark.parametrize(
    "evidence",
    [
        _evidence(500, 1),
        _evidence(500, 0, rules=NO_BOUNDARY),
        _evidence(500, 0, stopped=False),  # a truncated answer may still be thinking
        _evidence(500, 0, prompt=(5, 6, END_THINK, 7)),  # the template closed the reasoning itself
    ],
    ids=["one has it", "none is configured", "all truncated", "in the prompt"],
)
def test_no_boundary_is_missed_where_one_was_seen_or_none_was_due(evidence: Evidence) -> None:
    assert evidence.finding("B1", RULES) is None


def test_a_boundary_of_an_earlier_turn_does_not_excuse_this_one() -> None:
    assert _evidence(10, 0, prompt=(5, END_THINK, *range(20, 40))).finding("B1", RULES) is not None


@pytest.mark.parametrize(("bad", "stops"), [(5, False), (6, True)])
def test_a_partition_with_more_than_half_of_its_answers_unfit_is_stopped(bad: int, stops: bool) -> None:
    evidence = Evidence()
    for row in range(10):
        reason = f"special token 1 inside the answer, at position {row}" if row < bad else None
        evidence.add([5], [10, END_THINK, STOP], True, reason, RULES)
    finding = evidence.finding("B2", RULES)
    assert (finding is not None) == stops
    if finding:
        assert "Partition B2: 6 of 10 answers" in finding
        assert "6 of them: special token N inside the answer, at position N" in finding


@pytest.mark.parametrize("seed", range(5))
def test_evidence_added_up_over_actors_is_the_evidence_of_one_actor(seed: int) -> None:
    rng = random.Random(seed)
    parts, whole = [Evidence() for _ in range(3)], Evidence()
    for _ in range(100):
        output = rng.choice([[10, STOP], [10, END_THINK, STOP], [10, 11]])
        reason = rng.choice([None, "empty answer", "special token 1 inside the answer, at position 3"])
        row = ([5, 6], output, output[-1] == STOP, reason, RULES)
        rng.choice(parts).add(*row)
        whole.add(*row)
    merged = Evidence()
    for part in parts:
        merged.merge(part)
    assert merged == whole
    assert merged.rows == 100


def test_the_report_of_stored_rows_is_what_plain_python_counts(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows: list[dict[str, Any]] = [
        {
            "partition": rng.choice(["a", "b"]),
            "output_ids": [
                rng.choice([10, 11, 12, 13, 14, 15, 16, 17, 18, END_THINK]) for _ in range(rng.randrange(1, 9))
            ],
            "finish_reason": rng.choice(["stop", "length"]),
        }
        for _ in range(101)
    ]
    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(pa.Table.from_pylist(rows[number::3], schema=SEQUENCE_SCHEMA), files[-1])
    with duckdb.connect() as db:
        found = report(db, files, [END_THINK])
    assert [entry["partition"] for entry in found] == ["a", "b"]
    assert sum(entry["rows"] for entry in found) == len(rows)
    for entry in found:
        mine = [row for row in rows if row["partition"] == entry["partition"]]
        lengths = [len(row["output_ids"]) for row in mine]
        finish = Counter(row["finish_reason"] for row in mine)
        assert entry["rows"] == len(mine)
        assert entry["output_tokens"] == sum(lengths)
        assert entry["mean_tokens"] == round(sum(lengths) / len(mine), 1)
        assert entry["token_quantiles"] == [
            int(np.quantile(lengths, q, method="inverted_cdf")) for q in (0.5, 0.9, 0.99)
        ]
        assert entry["truncated_share"] == pytest.approx(finish["length"] / len(mine), abs=1e-4)
        with_boundary = sum(END_THINK in row["output_ids"] for row in mine)
        assert entry["boundary_share"] == pytest.approx(with_boundary / len(mine), abs=1e-4)


def test_a_report_of_no_files_is_empty_and_without_boundary_ids_the_share_is_0(tmp_path: Path) -> None:
    file = str(tmp_path / "0.parquet")
    row = {"partition": "a", "output_ids": [END_THINK], "finish_reason": "stop"}
    pq.write_table(pa.Table.from_pylist([row], schema=SEQUENCE_SCHEMA), file)
    with duckdb.connect() as db:
        assert report(db, [], [END_THINK]) == []
        assert report(db, [file], [])[0]["boundary_share"] == 0
        assert report(db, [file], [END_THINK])[0]["boundary_share"] == 1


@pytest.mark.parametrize(
    ("prompt_ids", "output_ids", "finish_reason", "cut"),
    [
        ([5, 6], [10, 11, 12], "length", True),
        ([5, 6], [10, END_THINK, 12], "length", False),  # the answer itself had begun
        ([5, 6], [10, 11, STOP], "stop", False),
        ([5, END_THINK, 6], [10, 11, 12], "length", False),  # the template had closed the reasoning
    ],
)
def test_reasoning_is_cut_where_the_length_came_before_the_boundary(
    prompt_ids: list[int], output_ids: list[int], finish_reason: str, cut: bool
) -> None:
    assert cut_in_reasoning(prompt_ids, output_ids, finish_reason, RULES) == cut
    assert not cut_in_reasoning(prompt_ids, output_ids, finish_reason, NO_BOUNDARY)


def _refusal(row: str) -> str:
    with pytest.raises(BadPrompt) as refused:
        parse(row.encode(), "id")
    return str(refused.value)


KINDS = {
    "the answer ends in a loop of N tokens": lambda i: judge([9, 10] * (20 + i), False, RULES),
    "special token N inside the answer, at position N": lambda i: judge([9] * i + [1 + i % 3, 9], False, STRICT),
    "unknown role N": lambda i: _refusal(f'{{"messages": [{{"role": "x{i} y", "content": "a"}}]}}'),
    "unknown speaker N": lambda i: _refusal(f'{{"conversations": [{{"from": "it\'s {i}", "value": "a"}}]}}'),
    "the id N is not valid Unicode": lambda i: _refusal(f'{{"id": "{i}\\ud800", "prompt": "a"}}'),
    "not JSON: Expecting N delimiter: line N column N (char N)": lambda i: _refusal('{"a": "' + "b" * i + '" 1}'),
}
STRICT = AuditRules(frozenset(), RULES.special_ids, frozenset(), 12, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_reasons_of_one_rule_are_of_one_kind(kind: str) -> None:
    reasons = {str(KINDS[kind](i)) for i in range(9)}
    assert len(reasons) > 2
    assert {kind_of(reason) for reason in reasons} == {kind}
    assert {kind_of(f"an earlier turn was rejected: {reason}") for reason in reasons} == {
        f"an earlier turn was rejected: {kind}"
    }
    told = duckdb.sql("SELECT regexp_replace(unnest($1), $2, 'N', 'g')", params=[[*reasons], VARYING]).fetchall()
    assert set(told) == {(kind,)}


def test_kinds_of_numbers_and_quoted_words_are_as_written_by_hand() -> None:
    assert kind_of("by 1.2e-05 of the tokens' doubt, limit 0.001: 84.6%") == "by N of the tokens' doubt, limit N: N%"
    assert kind_of("the target's 'a b' and \"c\".") == "the target's N and N."
