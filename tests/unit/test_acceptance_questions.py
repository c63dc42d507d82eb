"""Prompt sets become the same questions, whichever of the known forms they are kept in."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.acceptance.questions import load_questions, turn_prompts
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.rendering import Renderer
from tests.tiny_target import IM_END


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_mt_bench_as_its_authors_keep_it_is_a_conversation_with_a_category(tmp_path: Path) -> None:
    path = write(tmp_path / "mt.jsonl", [{"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}])
    [question] = load_questions([path])
    assert (question.dataset, question.category, question.prompt.prompt_id) == ("mt", "writing", "81")
    assert question.prompt.turns == [[{"role": "user", "content": "One?"}], [{"role": "user", "content": "Two?"}]]


def test_gsm8k_as_its_authors_keep_it_is_one_question_each(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    [question] = load_questions([path])
    assert question.prompt.turns == [[{"role": "user", "content": "1 + 1?"}]]
    assert question.category == ""


def test_a_limit_takes_the_first_rows_of_each_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [{"prompt": str(n)} for n in range(5)]) for name in "ab"]
    assert [q.dataset for q in load_questions(paths, limit=2)] == ["a", "a", "b", "b"]


def test_a_row_that_cannot_be_used_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", [{"prompt": "fine"}, {"text": "of no known form"}])
    with pytest.raises(PromptSourceError, match=r"bad\.jsonl, line 2: none of messages"):
        load_questions([path])


def test_an_id_that_stands_twice_in_a_dataset_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.jsonl", [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}])
    with pytest.raises(PromptSourceError, match="the id x stands in twice twice"):
        load_questions([path])


@pytest.mark.parametrize("name", ["all", "without loops"])
def test_a_dataset_that_is_called_as_a_total_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / f"{name}.jsonl", [{"prompt": "a"}])
    with pytest.raises(PromptSourceError, match=f"{name} is the name of a total"):
        load_questions([path])


def test_a_row_that_is_nested_too_deeply_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(PromptSourceError, match=r"set\.jsonl, line 1: not JSON"):
        load_questions([str(path)])


def test_a_later_turn_is_rendered_with_the_targets_own_answer(tmp_path: Path, target: Path) -> None:
    renderer = Renderer(target)
    rows = [{"id": "m", "turns": ["What?", "Why?"]}, {"id": "s", "prompt": "Where?"}]
    questions = load_questions([write(tmp_path / "set.jsonl", rows)])
    first = turn_prompts(questions, renderer, {}, 0)
    assert [prompt.name for prompt in first] == ["set/m", "set/s"]
    answer = [*renderer.encode("Paris."), IM_END]
    [second] = turn_prompts(questions, renderer, {"set/m": answer, "set/s": answer}, 1)
    assert second.name == "set/m#1"
    assert renderer.text(second.prompt_ids) == (
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert turn_prompts(questions, renderer, {}, 2) == []


def test_the_evaluation_sets_have_the_known_sizes(shared_data: Path) -> None:
    questions = load_questions([str(shared_data / "eval")])
    by_dataset = {name: [q for q in questions if q.dataset == name] for name in ("gsm8k_test", "mt_bench")}
    assert {name: len(of) for name, of in by_dataset.items()} == {"gsm8k_test": 80, "mt_bench": 80}
    assert {q.turns for q in by_dataset["mt_bench"]} == {2}
    assert len({q.category for q in by_dataset["mt_bench"]}) == 8
