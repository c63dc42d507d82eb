"""A plain speculative decoder: what an engine with an EAGLE-3 drafter has to do, in as few lines as say it.

Chain drafts, one sequence at a time, no batching, no tree. Greedy decoding accepts a draft where it is the target's
own argmax, so its output equals plain greedy decoding. Sampling follows Leviathan et al. 2023 (arXiv 2211.17192,
algorithm 1): a draft x drawn from q is kept with probability min(1, p(x) / q(x)), the first one that is not kept is
replaced by a draw from max(0, p - q), normalised, and behind a chain that was kept whole comes a draw from p. Every
token is then distributed as the target's own p, whatever the drafter is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from eagle3_ray.acceptance.tally import Acceptance, of_answer

Choose = Callable[[torch.Tensor], int]
"""From logits over the draft vocabulary [Vd] to the index of the drafted token in it."""


class CachedTarget(Protocol):
    """A target model that remembers the tokens which it has read."""

    def read(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads on; returns the logits [n, V] behind each of the n new tokens, and their aux_hidden [n, 3H]."""

    def forget(self, length: int) -> None:
        """Keeps the first `length` tokens only."""


class Propose(Protocol):
    """A drafter: `steps` tokens behind input_ids [P+1], of which the states of all but the last are known [P, 3H]."""

    def __call__(
        self, aux_hidden: torch.Tensor, input_ids: torch.Tensor, steps: int, choose: Choose
    ) -> tuple[list[int], torch.Tensor]:
        """The drafts as target ids, and the logits over the draft vocabulary [steps, Vd] that they were chosen by."""


@dataclass(frozen=True)
class Decoded:
    """An answer, and how many drafts each verify step accepted."""

    output_ids: list[int]
    accepted: list[int]

    @property
    def acceptance(self) -> Acceptance:
        return of_answer(len(self.output_ids), self.accepted)


def decode(
    target: CachedTarget,
    propose: Propose,
    draft_ids: torch.Tensor,
    prompt_ids: Sequence[int],
    *,
    steps: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decodes one answer with `steps` drafts to a verify step.

    Args:
        draft_ids: the target id of each draft vocabulary entry, int64 [Vd] (d2t + arange).
        temperature: 0 is greedy; else all draws come from `generator`.
    """
    rule = _Rule(draft_ids, temperature, generator)
    target.forget(0)
    logits, aux_hidden = target.read(prompt_ids)
    ids = [*prompt_ids, rule.choose(logits[-1])]
    accepted: list[int] = []
    while not (end := _end(ids[len(prompt_ids) :], max_new_tokens, stop_ids)):
        drafts, draft_logits = propose(aux_hidden, torch.tensor(ids), steps, rule.choose)
        logits, new_hidden = target.read([ids[-1], *drafts])
        kept, token = rule.verify(drafts, draft_logits, logits)
        target.forget(len(ids) + kept)
        aux_hidden = torch.cat([aux_hidden, new_hidden[: kept + 1]])
        ids += [*drafts[:kept], token]
        accepted.append(kept)
    return Decoded(ids[len(prompt_ids) : len(prompt_ids) + end], accepted)


def decode_plainly(
    target: CachedTarget, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """Greedy decoding without a drafter, a token at a time: what `decode` has to equal."""
    target.forget(0)
    logits, _ = target.read(prompt_ids)
    answer = [int(logits[-1].argmax())]
    while not _end(answer, max_new_tokens, stop_ids):
        logits, _ = target.read(answer[-1:])
        answer.append(int(logits[-1].argmax()))
    return answer


def _end(answer: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> int:
    """The answer's length up to its stop token or the limit; 0 while there is neither."""
    stop = next((n for n, token in enumerate(answer, start=1) if token in stop_ids), max_new_tokens)
    length = min(stop, max_new_tokens)
    return length if len(answer) >= length else 0


class _Rule:
    """Draws tokens and judges drafts, greedily or at a temperature."""

    def __init__(self, draft_ids: torch.Tensor, temperature: float, generator: torch.Generator | None) -> None:
        self._draft_ids = draft_ids
        self._temperature = temperature
        self._generator = generator

    def choose(self, logits: torch.Tensor) -> int:
        """An index into the logits, of the target or the drafter: the argmax, or a draw."""
        return int(logits.argmax()) if self._temperature == 0 else self._sample(self._probabilities(logits))

    def verify(self, drafts: Sequence[int], draft_logits: torch.Tensor, target_logits: torch.Tensor) -> tuple[int, int]:
        """How many drafts stay, and the target's token behind them. draft_logits [k, Vd], target_logits [k+1, V]."""
        for kept, draft in enumerate(drafts):
            token = self._replacement(draft, draft_logits[kept], target_logits[kept])
            if token is not None:
                return kept, token
        return len(drafts), self.choose(target_logits[-1])

    def _replacement(self, draft: int, draft_logits: torch.Tensor, target_logits: torch.Tensor) -> int | None:
        """The token that takes the draft's place, None where the draft stays."""
        if self._temperature == 0:
            best = int(target_logits.argmax())
            return None if best == draft else best
        p = self._probabilities(target_logits)
        q = torch.zeros_like(p)  # the drafter gives nothing to tokens outside its vocabulary
        q[self._draft_ids] = self._probabilities(draft_logits)
        if torch.rand((), generator=self._generator, dtype=p.dtype) * q[draft] < p[draft]:
            return None
        return self._sample((p - q).clamp(min=0))

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.double() / self._temperature).softmax(-1)

    def _sample(self, weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))


class CachedTransformers:
    """A CachedTarget on transformers, for models that fit on this machine and keep all keys (no sliding window)."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        """`layers`: the HF hidden_states indices that aux_hidden is made of, in the drafter's order."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
        self.layers = tuple(layers)
        self._cache: Any = None

    def read(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers import DynamicCache

        self._cache = self._cache or DynamicCache(config=self.model.config)
        with torch.inference_mode():
            out = self.model(
                torch.tensor([list(ids)], device=self.model.device),
                past_key_values=self._cache,
                output_hidden_states=True,
                use_cache=True,
            )
        return out.logits[0], torch.cat([out.hidden_states[layer][0] for layer in self.layers], dim=-1)

    def forget(self, length: int) -> None:
        read = self._cache.get_seq_length() if self._cache else 0
        if length == 0:
            self._cache = None
        elif length < read:
            self._cache.crop(length - read)  # transformers 5: a negative number of tokens to drop
