"""Prompt sets to measure acceptance on: MT-bench, GSM8K, and any file that `prompts.py` reads.

A dataset is a partition, a category is the row's own `category` (MT-bench has eight), else empty. Rows are read as
`jobs/prepare.py --against` reads the same files, so that what is kept out of training is what is asked here.

All turns of a conversation count. Later turns are rendered with the target's own answers, and these are fixed once, by
the plain engine: every drafter is measured on the same prompt ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3_ray.acceptance.tally import EVERYTHING, WITHOUT_LOOPS
from eagle3_ray.prompts import BadPrompt, Prompt, PromptSourceError, find, parse, read, usual_form
from eagle3_ray.rendering import Renderer


@dataclass(frozen=True)
class Question:
    """One row of a prompt set: a conversation of one turn or more."""

    dataset: str
    category: str
    prompt: Prompt

    @property
    def turns(self) -> int:
        return len(self.prompt.turns) or 1


@dataclass(frozen=True)
class EvalPrompt:
    """What the engine is sent: the exact prompt ids of one turn."""

    dataset: str
    category: str
    prompt_id: str
    turn: int
    prompt_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.prompt_id}" + (f"#{self.turn}" if self.turn else "")


def load_questions(paths: Sequence[str], limit: int | None = None) -> list[Question]:
    """The questions of files, folders or globs, at most the first `limit` rows of each file.

    Raises:
        PromptSourceError: nothing there, an empty file, a row that cannot be used, two rows of a dataset with one id.
    """
    questions: dict[tuple[str, str], Question] = {}
    for source in (source for path in paths for source in find(path)):
        if source.partition in (EVERYTHING, WITHOUT_LOOPS):
            raise PromptSourceError(f"{source.path}: {source.partition} is the name of a total. Give it another name.")
        before = len(questions)
        for line, raw in read(source):
            if limit is not None and line > limit:
                break
            try:
                question = _question(raw, source.partition, line)
            except BadPrompt as error:
                raise PromptSourceError(
                    f"{source.path}, line {line}: {error}. Every row of a prompt set has to be usable; mend or drop it."
                ) from None
            key = (question.dataset, question.prompt.prompt_id)
            if key in questions:
                raise PromptSourceError(f"{source.path}, line {line}: the id {key[1]} stands in {key[0]} twice.")
            questions[key] = question
        if len(questions) == before:
            raise PromptSourceError(f"{source.path} holds no rows. Get it again, or leave it out.")
    return list(questions.values())


def turn_prompts(
    questions: Sequence[Question], renderer: Renderer, answers: Mapping[str, Sequence[int]], turn: int
) -> list[EvalPrompt]:
    """The prompts of one turn (from 0) of all questions that have it.

    `answers` holds the output ids of earlier turns by `EvalPrompt.name`.

    Raises:
        PromptSourceError: the chat template refuses a row.
    """
    prompts = []
    for question in questions:
        if turn < question.turns:
            named = [
                EvalPrompt(question.dataset, question.category, question.prompt.prompt_id, earlier, ()).name
                for earlier in range(turn)
            ]
            try:
                ids = renderer.prompt_ids(question.prompt, [answers[name] for name in named])
            except BadPrompt as error:
                raise PromptSourceError(f"{question.dataset}/{question.prompt.prompt_id}: {error}.") from None
            prompts.append(EvalPrompt(question.dataset, question.category, question.prompt.prompt_id, turn, tuple(ids)))
    return prompts


def _question(raw: bytes, dataset: str, line: int) -> Question:
    prompt = parse(usual_form(raw), f"line-{line}")
    return Question(dataset, str(json.loads(raw).get("category") or ""), prompt)
