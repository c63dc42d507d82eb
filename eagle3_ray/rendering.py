"""From messages to the ids that the target reads: the model's own chat template and nothing else.

What the template puts at the end of a prompt (`<think>`, say) is part of `prompt_ids`. In a conversation the target's
answer comes back as a message, the way a chat server would send it to the template; those ids are prompt and are never
supervised.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_ray.prompts import BadPrompt, Message, Prompt

_OURS = frozenset(("chat_template", "max_length", "padding", "return_tensors", "tokenizer_kwargs", "truncation"))
"""Options of `apply_chat_template` that are no variables of a template: they would change or cut the ids."""
_USER_WORDS = "~user's words~"


class Renderer:
    """The target's tokenizer and chat template.

    `boundary_ids` are the tokens that separate reasoning from the answer (`</think>`), for templates that take
    `reasoning_content` of earlier turns.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False, boundary_ids: Sequence[int] = ()) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        self._boundary_ids = set(boundary_ids)

    @property
    def special_ids(self) -> list[int]:
        """Ids of the control tokens, sorted."""
        return sorted(self._tokenizer.all_special_ids)

    def prompt_ids(self, prompt: Prompt, answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Ids of the turn behind `answers`: turn 0 with no answers, turn 1 with one, ...

        Raises:
            BadPrompt: the template refuses the messages.
        """
        if prompt.input_ids is not None:
            return prompt.input_ids
        if prompt.target_asks:
            return self._before_a_question(prompt)
        messages = list(prompt.turns[0])
        for answer, questions in zip(answers, prompt.turns[1:], strict=False):
            messages += [self._message(answer), *questions]
        return self._render(messages, prompt.tools, prompt.chat_template_kwargs)

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text with every special token visible, for people."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it stands, no special token added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _before_a_question(self, prompt: Prompt) -> list[int]:
        """Ids up to where a user's words begin: what the target says next is a question (arXiv 2406.08464)."""
        messages = [*prompt.turns[0], {"role": "user", "content": _USER_WORDS}]
        text = self._apply(messages, None, prompt.chat_template_kwargs, add_generation_prompt=False, tokenize=False)
        before, words, _ = text.partition(_USER_WORDS)
        if not words or not before:
            raise BadPrompt("the chat template has no beginning of a user's turn")
        return self.encode(before)

    def _render(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]) -> list[int]:
        ids = self._apply(messages, tools, options, add_generation_prompt=True, tokenize=True, return_dict=False)
        if not ids:
            raise BadPrompt("the chat template gives no tokens")
        return list(ids)

    def _apply(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any], **how: bool) -> Any:
        import jinja2

        if not _OURS.isdisjoint(options):
            raise BadPrompt(f"chat_template_kwargs has {min(_OURS & set(options))}, which is no variable of a template")
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **how, **options)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadPrompt(f"the chat template refuses it: {error}") from None

    def _message(self, answer: Sequence[int]) -> Message:
        boundary = max((i for i, token in enumerate(answer) if token in self._boundary_ids), default=-1)
        message = {"role": "assistant", "content": self._plain_text(answer[boundary + 1 :])}
        if boundary >= 0:
            message["reasoning_content"] = self._plain_text(answer[:boundary])
        return message

    def _plain_text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
