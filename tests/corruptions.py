"""What happens to generated answers on their way to training, done to real ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from eagle3_ray.target.protocol import TokenSequence


@dataclass(frozen=True)
class Generated:
    """A prompt and what the target answered: ids, log-probabilities, and the temperature they were drawn at."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    temperature: float

    def sequence(self, name: str) -> TokenSequence:
        return TokenSequence(name, np.array(self.prompt + self.answer, np.int32), len(self.prompt))


def without(row: Generated, position: int) -> Generated:
    """A token is gone, and its log-probability with it."""
    return replace(
        row,
        answer=row.answer[:position] + row.answer[position + 1 :],
        logprobs=row.logprobs[:position] + row.logprobs[position + 1 :],
    )


def of_another(row: Generated, other: Generated) -> Generated:
    """The ids of another answer under this one's log-probabilities."""
    length = min(len(row.answer), len(other.answer))
    return replace(row, answer=other.answer[:length], logprobs=row.logprobs[:length])


def with_token(row: Generated, position: int, token: int, logprob: float) -> Generated:
    return replace(
        row,
        answer=[*row.answer[:position], token, *row.answer[position:]],
        logprobs=[*row.logprobs[:position], logprob, *row.logprobs[position:]],
    )


def with_prompt(row: Generated, prompt: list[int]) -> Generated:
    return replace(row, prompt=prompt)


def retokenised(row: Generated, pieces: Callable[[int], list[int]]) -> Generated:
    """The first token that the tokenizer can also write as two is written so; its log-probability is shared out."""
    for position, token in enumerate(row.answer):
        found = pieces(token)
        if len(found) == 2:
            halves = [row.logprobs[position] / 2] * 2
            return replace(
                row,
                answer=[*row.answer[:position], *found, *row.answer[position + 1 :]],
                logprobs=[*row.logprobs[:position], *halves, *row.logprobs[position + 1 :]],
            )
    raise AssertionError("no token of this answer can be written as two")


def shuffled(row: Generated) -> Generated:
    order = np.random.default_rng(0).permutation(len(row.answer))
    return replace(row, answer=[row.answer[i] for i in order])


def corruptions(
    bos: int, end: int, think: list[int], pieces: Callable[[int], list[int]]
) -> dict[str, Callable[[Generated, Generated], Generated]]:
    """Each makes a corrupt row of a row and its neighbour."""
    return {
        "first token stripped": lambda row, _: without(row, 0),
        "inner token dropped": lambda row, _: without(row, len(row.answer) // 2),
        "answer re-tokenised": lambda row, _: retokenised(row, pieces),
        "one token replaced": lambda row, _: replace(row, answer=[*row.answer[:4], row.answer[0], *row.answer[5:]]),
        "token repeated": lambda row, _: with_token(row, 5, row.answer[4], row.logprobs[4]),
        "invented end": lambda row, _: with_token(row, len(row.answer), end, 0.0),
        "tokens shuffled": lambda row, _: shuffled(row),
        "answers swapped": of_another,
        "prompts swapped": lambda row, other: with_prompt(row, other.prompt),
        "prompt cut on the left": lambda row, _: with_prompt(row, row.prompt[8:]),
        "prompt cut on the right": lambda row, _: with_prompt(row, row.prompt[:-1]),
        "second BOS": lambda row, _: with_prompt(row, [bos, *row.prompt]),
        "system message left out": lambda row, _: with_prompt(row, row.prompt[row.prompt.index(end) + 2 :]),
        "empty think block in the template": lambda row, _: with_prompt(row, [*row.prompt, *think]),
        "template token changed": lambda row, _: with_prompt(row, [*row.prompt[:-2], row.prompt[1], row.prompt[-1]]),
        "log-probabilities shifted": lambda row, _: replace(row, logprobs=[*row.logprobs[1:], row.logprobs[0]]),
        "log-probabilities of another": lambda row, other: replace(
            row, logprobs=(other.logprobs * 40)[: len(row.answer)]
        ),
    }
