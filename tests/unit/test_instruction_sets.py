"""The forms in which people publish instructions, and what a row that cannot be used says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.acceptance.questions import load_questions
from eagle3_ray.instruction_sets import PUBLIC_SETS, parse_row, public_rows
from eagle3_ray.prompts import BadPrompt


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


USUAL: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": [_user("a"), {"role": "assistant", "content": "no"}, _user("b")]}, ["a", "b"]),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no"}]}, ["a"]),
    ({"prompt": "a", "instruction": "no"}, ["a"]),
    ({"instruction": "Translate.", "input": "a", "output": "no"}, ["Translate.\n\na"]),
    ({"instruction": "Count.", "input": "", "output": "no"}, ["Count."]),
    ({"question": "a", "answer": "no"}, ["a"]),
    ({"problem": "a", "solution": "no"}, ["a"]),
    ({"query": "a", "response": "no"}, ["a"]),
    ({"question_id": 81, "turns": ["a", "b"], "reference": ["no"]}, ["a", "b"]),
]


@pytest.mark.parametrize(("row", "texts"), USUAL)
def test_every_usual_form_of_a_row_gives_the_questions_without_the_answers(row: Any, texts: list[str]) -> None:
    prompt = parse_row(json.dumps(row).encode(), "f:1", column=None)
    assert prompt.turns == [[_user(text)] for text in texts]
    assert prompt.prompt_id == ("81" if "question_id" in row else "f:1")


@pytest.mark.parametrize("system", ["system", "system_prompt"])
@pytest.mark.parametrize("form", ["prompt", "question", "turns", "messages", "conversations"])
def test_what_stands_beside_a_question_goes_along_with_it(form: str, system: str) -> None:
    questions = {
        "prompt": "a",
        "question": "a",
        "turns": ["a"],
        "messages": [_user("a")],
        "conversations": [{"from": "human", "value": "a"}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {form: questions[form], system: "S", "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    prompt = parse_row(json.dumps(row).encode(), "f:1", column=None)
    assert prompt.turns == [[{"role": "system", "content": "S"}, _user("a")]]
    assert (prompt.tools, prompt.chat_template_kwargs) == (tools, {"enable_thinking": False})
    bare = parse_row(json.dumps({form: questions[form], system: ""}).encode(), "f:1", column=None)
    assert bare.turns == [[_user("a")]]


def test_two_system_texts_are_refused() -> None:
    row = {"messages": [{"role": "system", "content": "S"}, _user("a")], "system": "T"}
    with pytest.raises(BadPrompt, match="a system text beside the messages and one in them"):
        parse_row(json.dumps(row).encode(), "f:1", column=None)


@pytest.mark.parametrize(("row", "texts"), USUAL)
def test_an_evaluation_asks_what_prepare_keeps_out_of_the_same_file(
    row: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    raw = json.dumps(row)
    (tmp_path / "set.jsonl").write_text(f"{raw}\n")
    [question] = load_questions([str(tmp_path / "set.jsonl")])
    assert question.prompt == parse_row(raw.encode(), "line-1", column=None)
    assert question.prompt.turns == [[_user(text)] for text in texts]


def test_a_public_set_has_no_nulls_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Datasets:
        @staticmethod
        def load_dataset(*_: Any, **__: Any) -> list[Any]:
            call = {"name": "weather", "arguments": {"city": "Bonn", "zip": None}}
            return [{"messages": [_user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    [(_, _, raw)] = public_rows(PUBLIC_SETS["ultrachat"])
    call = {"name": "weather", "arguments": {"city": "Bonn"}}
    assert json.loads(raw) == {"messages": [_user("a"), {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("no json", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"text": "a"}', "none of messages, conversations, prompt, input_ids, turns, instruction, question"),
        ('{"turns": []}', "empty or not a list"),
        ('{"turns": [1]}', "without content"),
        ('{"question": " "}', "not a text with content"),
        ('{"input_ids": [1, 2]}', "no text to compare"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(raw: str, reason: str) -> None:
    with pytest.raises(BadPrompt, match=reason):
        parse_row(raw.encode(), "f:1", column=None)


def test_of_a_public_set_only_its_column_is_taken() -> None:
    row = json.dumps({"id": 7, "prompt": "no", "question": "yes", "input": "no"}).encode()
    assert parse_row(row, "f:1", column="question").turns == [[_user("yes")]]
    with pytest.raises(BadPrompt):
        parse_row(row, "f:1", column="instruction")
