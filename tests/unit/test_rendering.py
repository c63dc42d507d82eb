"""Prompts become the ids that the template and the tokenizer give, held against strings written by hand.

The expected ids come from the `tokenizers` library alone, which knows neither the chat template nor `transformers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eagle3_ray.prompts import BadPrompt, Prompt, parse
from eagle3_ray.rendering import Renderer
from tests.tiny_target import END_THINK, IM_END, SPECIAL_TOKENS, THINK

THINKING = {"enable_thinking": True}
ASK = "<|im_start|>assistant\n"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer(target: Path) -> Renderer:
    return Renderer(target, boundary_ids=[END_THINK])


@pytest.fixture(scope="module")
def plain(target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(target / "tokenizer.json"))


def _ids(plain: Tokenizer, text: str) -> list[int]:
    ids: list[int] = plain.encode(text, add_special_tokens=False).ids
    return ids


def _prompt(**row: Any) -> Prompt:
    return parse(json.dumps(row).encode(), "file:1")


def _said(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_a_prompt_is_rendered_as_a_user_message_with_the_generation_prompt_and_nothing_else(
    renderer: Renderer, plain: Tokenizer
) -> None:
    ids = renderer.prompt_ids(_prompt(prompt="What is the capital of France?"))
    assert ids == _ids(plain, _said("user", "What is the capital of France?") + ASK)
    assert all(type(token) is int for token in ids)


def test_a_template_that_ends_in_think_puts_it_at_the_end_of_the_prompt_ids(
    renderer: Renderer, plain: Tokenizer
) -> None:
    without = renderer.prompt_ids(_prompt(prompt="Why?"))
    thinking = renderer.prompt_ids(_prompt(prompt="Why?", chat_template_kwargs=THINKING))
    assert thinking == [*without, THINK]
    assert thinking == _ids(plain, _said("user", "Why?") + ASK + "<think>")
    assert renderer.prompt_ids(_prompt(prompt="Why?", chat_template_kwargs={"enable_thinking": False})) == without


def test_a_target_that_asks_gets_the_template_up_to_where_a_user_begins(renderer: Renderer, plain: Tokenizer) -> None:
    assert renderer.prompt_ids(_prompt(target_asks=True)) == _ids(plain, "<|im_start|>user\n")
    with_system = renderer.prompt_ids(_prompt(target_asks=True, system="You write children's stories."))
    assert with_system == _ids(plain, _said("system", "You write children's stories.") + "<|im_start|>user\n")


def test_system_developer_and_tool_messages_reach_the_template_in_their_order(
    renderer: Renderer, plain: Tokenizer
) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    prompt = _prompt(
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ]
    )
    expected = (
        _said("system", "Be short.")
        + _said("developer", "Use tools.")
        + _said("user", "Rain?")
        + _said("assistant", json.dumps(calls))
        + _said("tool", "sun")
        + ASK
    )
    assert len(prompt.turns) == 1
    assert renderer.prompt_ids(prompt) == _ids(plain, expected)


def test_tools_are_given_to_the_template(renderer: Renderer, plain: Tokenizer) -> None:
    ids = renderer.prompt_ids(_prompt(messages=[{"role": "user", "content": "Rain?"}], tools=[WEATHER]))
    assert ids == _ids(plain, f"<|im_start|>tools\n{json.dumps([WEATHER])}<|im_end|>\n" + _said("user", "Rain?") + ASK)


def test_each_turn_of_a_conversation_is_rendered_with_the_answers_before_it(
    renderer: Renderer, plain: Tokenizer
) -> None:
    prompt = _prompt(
        messages=[{"role": "system", "content": "S"}] + [{"role": "user", "content": f"question {n}"} for n in range(3)]
    )
    answers = [[*_ids(plain, f"answer {n}"), IM_END] for n in range(2)]
    so_far = _said("system", "S") + _said("user", "question 0")
    assert renderer.prompt_ids(prompt) == _ids(plain, so_far + ASK)
    so_far += _said("assistant", "answer 0") + _said("user", "question 1")
    assert renderer.prompt_ids(prompt, answers[:1]) == _ids(plain, so_far + ASK)
    so_far += _said("assistant", "answer 1") + _said("user", "question 2")
    assert renderer.prompt_ids(prompt, answers) == _ids(plain, so_far + ASK)


def test_the_reasoning_of_an_answer_goes_to_the_template_as_reasoning_content(
    renderer: Renderer, plain: Tokenizer
) -> None:
    prompt = _prompt(
        messages=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
        chat_template_kwargs=THINKING,
    )
    answer = [*_ids(plain, "hm, let me see"), END_THINK, *_ids(plain, "it is 1"), IM_END]
    expected = (
        _said("user", "one")
        + "<|im_start|>assistant\n<think>hm, let me see</think>it is 1<|im_end|>\n"
        + _said("user", "two")
        + ASK
        + "<think>"
    )
    assert renderer.prompt_ids(prompt, [answer]) == _ids(plain, expected)


def test_without_a_boundary_the_answer_is_content_as_a_whole(target: Path, plain: Tokenizer) -> None:
    renderer = Renderer(target)
    prompt = _prompt(messages=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    answer = [*_ids(plain, "hm"), IM_END]
    expected = _said("user", "one") + _said("assistant", "hm") + _said("user", "two") + ASK
    assert renderer.prompt_ids(prompt, [answer]) == _ids(plain, expected)


def test_rendering_a_later_turn_leaves_the_prompt_as_it_was(renderer: Renderer) -> None:
    prompt = _prompt(messages=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    first = renderer.prompt_ids(prompt)
    renderer.prompt_ids(prompt, [[50, IM_END]])
    assert renderer.prompt_ids(prompt) == first
    assert [len(turn) for turn in prompt.turns] == [1, 1]


def test_ready_ids_pass_through_untouched(renderer: Renderer) -> None:
    assert renderer.prompt_ids(_prompt(input_ids=[5, 1, 399, 5])) == [5, 1, 399, 5]


@pytest.mark.parametrize(
    "text",
    [
        "naïve café — “quotes”",
        "日本語テキスト",
        "مرحبا بالعالم",
        "👩‍👩‍👧‍👦 🏳️‍🌈",
        "e\u0301 vs \u00e9",
        "zero\u200bwidth\ufeff\u2028\u0000\u0007",
        "\U0010ffff\ue000",
        "  tabs\t\tand\r\nline ends\n\n ",
        "x" * 20_000 + "😀" * 5_000,
    ],
    ids=["latin", "japanese", "arabic", "emoji", "combining", "invisible", "private", "blanks", "huge"],
)
def test_any_unicode_comes_back_from_its_ids_unchanged(renderer: Renderer, plain: Tokenizer, text: str) -> None:
    ids = renderer.prompt_ids(_prompt(prompt=f"a{text}b"))
    assert ids == _ids(plain, _said("user", f"a{text}b") + ASK)
    assert renderer.text(ids) == _said("user", f"a{text}b") + ASK


def test_text_shows_every_special_token(renderer: Renderer) -> None:
    assert renderer.text(range(5)) == "".join(SPECIAL_TOKENS)
    assert renderer.special_ids == [0, 1, 2, 3, 4]


def test_encode_adds_no_token_of_its_own(renderer: Renderer, plain: Tokenizer) -> None:
    assert renderer.encode("the capital<|im_end|>") == [*_ids(plain, "the capital"), IM_END]
    assert renderer.encode("") == []


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "tool", "content": "sun"}]},
        {"prompt": "half a pair \ud800"},
        {"messages": [{"role": "user", "content": "q"}], "tools": [1], "chat_template_kwargs": {"messages": []}},
    ],
    ids=["template raises", "lone surrogate", "name clash"],
)
def test_what_the_template_refuses_is_a_bad_prompt(renderer: Renderer, row: dict[str, Any]) -> None:
    with pytest.raises(BadPrompt, match="the chat template refuses it"):
        renderer.prompt_ids(_prompt(**row))


@pytest.mark.parametrize(
    "options",
    [
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 50},
        {"return_tensors": "pt"},
        {"chat_template": "{{ 'x' }}"},
        {"tokenizer_kwargs": {"truncation": True}},
        {"tokenize": False},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_dict": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_template_options_that_would_change_what_is_rendered_are_refused(
    renderer: Renderer, options: dict[str, Any]
) -> None:
    with pytest.raises(BadPrompt):
        renderer.prompt_ids(_prompt(prompt="a question that is long enough", chat_template_kwargs=options))


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ messages[7].role.x }}", "{{ messages[0]['content'] + 1 }}"])
def test_a_template_that_breaks_on_a_row_costs_that_row(tmp_path: Path, template: str, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((target / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(BadPrompt, match="the chat template refuses it"):
        Renderer(tmp_path).prompt_ids(_prompt(prompt="q"))


def test_a_template_that_gives_nothing_is_refused(tmp_path: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((target / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if false %}x{% endif %}")
    with pytest.raises(BadPrompt, match="gives no tokens"):
        Renderer(tmp_path).prompt_ids(_prompt(prompt="q"))


def test_mt_bench_conversations_have_two_turns_whose_prompts_grow(
    renderer: Renderer, plain: Tokenizer, shared_data: Path
) -> None:
    lines = (shared_data / "eval/mt_bench.jsonl").read_bytes().splitlines()
    for line in lines[:20]:
        first, second = (message["content"] for message in json.loads(line)["messages"])
        prompt = parse(line, "x")
        answer = _ids(plain, "It is so.")
        assert renderer.prompt_ids(prompt) == _ids(plain, _said("user", first) + ASK)
        expected = _said("user", first) + _said("assistant", "It is so.") + _said("user", second) + ASK
        assert renderer.prompt_ids(prompt, [[*answer, IM_END]]) == _ids(plain, expected)
