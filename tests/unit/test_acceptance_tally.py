"""The acceptance length is tokens that verify steps yielded, by verify steps, pooled."""

import pytest

from eagle3_ray.acceptance.tally import Acceptance, of_answer, pool


def test_the_prefills_token_does_not_count() -> None:
    # 1 token from the prefill, then 3 steps that yield 1 + 2, 1 + 0 and 1 + 1 tokens
    answer = of_answer(7, [2, 0, 1])
    assert (answer.tokens, answer.verify_steps, answer.histogram) == (6, 3, (1, 1, 1))
    assert answer.length == 2.0


def test_answers_are_pooled_by_verify_steps_and_not_averaged() -> None:
    short, long = of_answer(5, [3]), of_answer(13, [0] * 12)
    assert (short.length, long.length) == (4.0, 1.0)
    both = pool([short, long])
    assert both.length == 16 / 13  # the mean of the two would be 2.5
    assert both.histogram == (12, 0, 0, 1)
    assert both.answers == 2


def test_drafts_accepted_behind_the_end_yield_no_tokens() -> None:
    answer = of_answer(4, [5])  # the step accepted five drafts, the stop token was the third
    assert answer.length == 3.0
    assert answer.accepted_drafts == 5


def test_an_answer_of_one_token_needs_no_verify_step_and_has_no_length() -> None:
    assert of_answer(1, []).length is None
    assert pool([of_answer(1, []), of_answer(3, [1])]).length == 2.0


def test_counts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="counts 2 verify steps, there were 3"):
        Acceptance(1, 3, 3, (2,))
    with pytest.raises(ValueError, match="cannot have yielded 5 tokens"):
        Acceptance(1, 5, 2, (1, 1))


def test_the_json_form_holds_the_length_and_what_it_is_made_of() -> None:
    assert of_answer(7, [2, 0, 1]).as_json() == {
        "acceptance_length": 2.0,
        "answers": 1,
        "tokens": 6,
        "verify_steps": 3,
        "histogram": [1, 1, 1],
    }
