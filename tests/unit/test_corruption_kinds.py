"""The table of corruptions says what is tested, and the document says what the table says."""

from collections import Counter

from tests.corruption_kinds import DOCUMENT, KINDS, document, exists


def test_every_kind_of_corruption_names_a_test_that_exists() -> None:
    assert [kind.test for kind in KINDS if not exists(kind.test)] == []


def test_there_are_forty_kinds_over_every_stage_and_none_stands_twice() -> None:
    assert len(KINDS) >= 40
    assert {kind: count for kind, count in Counter((one.stage, one.what) for one in KINDS).items() if count > 1} == {}
    stages = {"prompts", "server", "answers", "tokens", "generate", "plan", "corpus", "states", "cache"}
    assert {kind.stage for kind in KINDS} == stages | {"checkpoints", "drafter", "target", "evaluation"}


def test_the_document_is_that_of_the_table() -> None:
    """`python -m tests.corruption_kinds` writes it."""
    assert DOCUMENT.read_text() == document()
