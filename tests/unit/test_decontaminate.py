"""What counts as a piece of an evaluation set."""

import pytest

from eagle3_ray.decontaminate import EvaluationTexts, Overlap


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("one two three four", "one two three"),
        ("so: ONE,\ntwo -- Three!", "one two three"),  # case, punctuation and line breaks do not count
        ("zero two three four", "two three four"),
        ("one two four three", None),
        ("one two", None),
        ("", None),
    ],
)
def test_three_words_in_a_row_are_an_overlap_whatever_stands_between_them(text: str, shared: str | None) -> None:
    texts = EvaluationTexts(ngram=3)
    texts.add("bench", "q1", ["One two, three. Four"])
    assert texts.overlap(["other", text]) == (Overlap("bench", "q1", shared) if shared else None)


def test_a_question_shorter_than_the_n_gram_matches_only_as_a_whole() -> None:
    texts = EvaluationTexts(ngram=13)
    texts.add("bench", "q1", ["What is the capital of France?"])
    assert texts.overlap(["what is the capital of france"]) == Overlap("bench", "q1", "what is the capital of france")
    assert texts.overlap(["What is the capital of France, and of Spain?"]) is None


def test_a_short_later_turn_marks_nothing_and_a_long_one_does() -> None:
    texts = EvaluationTexts(ngram=5)
    texts.add("bench", "q1", ["first question", "Explain your answer.", "start every sentence with an A"])
    assert texts.overlap(["Explain your answer."]) is None
    assert texts.overlap(["please start every sentence with an A"]) == Overlap(
        "bench", "q1", "start every sentence with an"
    )


def test_chinese_and_japanese_count_by_the_character_and_composed_accents_like_others() -> None:
    texts = EvaluationTexts(ngram=4)
    texts.add("bench", "zh", ["法国的首都是哪里"])
    texts.add("bench", "fr", ["un café très serré"])
    assert texts.overlap(["请问法国的首都"]) == Overlap("bench", "zh", "法 国 的 首")
    assert texts.overlap(["un cafe\u0301 tre\u0300s serre\u0301"]) == Overlap("bench", "fr", "un café très serré")


def test_words_that_stand_in_two_evaluation_sets_are_reported_for_the_first() -> None:
    texts = EvaluationTexts(ngram=2)
    texts.add("first", "q1", ["one two"])
    texts.add("second", "q1", ["one two three"])
    assert texts.overlap(["one two"]) == Overlap("first", "q1", "one two")
    assert texts.overlap(["two three"]) == Overlap("second", "q1", "two three")
