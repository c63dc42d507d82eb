"""Whether a training prompt holds a piece of an evaluation set: n words in a row. Knows texts only, nothing of files.

Case, punctuation and line breaks do not count. A word is a run of letters and digits; Chinese and Japanese, which put
no spaces, count by the character. Thirteen words is the usual length (Brown et al. 2020, "Language Models are Few-Shot
Learners", appendix C: 8 to 13).

A text with fewer words than that matches a text of exactly these words and nothing else. Of a conversation's later
turns the short ones are left out: "Explain your answer." says nothing about where it comes from.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_SCRIPTS_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_SCRIPTS_WITHOUT_SPACES}]|[^\W_{_SCRIPTS_WITHOUT_SPACES}]+")


@dataclass(frozen=True)
class Overlap:
    """The words that a training text shares with a row of an evaluation set."""

    evaluation_set: str
    row_id: str
    words: str


class EvaluationTexts:
    """All n-grams of the evaluation sets, in memory: about 150 bytes for each word of theirs.

    Args:
        ngram: how many words in a row count as a copy, at least 1.
    """

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._rows: list[tuple[str, str]] = []
        self._row_of: dict[str, int] = {}

    def add(self, evaluation_set: str, row_id: str, turns: Sequence[str]) -> None:
        """Takes the user's turns of one evaluation row; words that stand in two rows belong to the first."""
        self._rows.append((evaluation_set, row_id))
        for place, turn in enumerate(turns):
            words = _words(turn)
            if place == 0 or len(words) >= self._ngram:
                for gram in self._grams(words):
                    self._row_of.setdefault(gram, len(self._rows) - 1)

    def overlap(self, texts: Iterable[str]) -> Overlap | None:
        """The first words of the texts that stand in an evaluation set, or None."""
        if not self._row_of:
            return None
        for text in texts:
            for gram in self._grams(_words(text)):
                row = self._row_of.get(gram)
                if row is not None:
                    return Overlap(*self._rows[row], gram)
        return None

    def _grams(self, words: list[str]) -> Iterator[str]:
        for start in range(max(1, len(words) - self._ngram + 1)) if words else ():
            yield " ".join(words[start : start + self._ngram])


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
