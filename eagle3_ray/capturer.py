"""One copy of the target at work: sequences of the corpus in, proved states out, to a shard of the cache or a trainer.

Before the first sequence the target has to reproduce what the engine said of sequences of this very corpus; after that
every sequence is held against its recorded log-probabilities. What does not fit comes out with its reason.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eagle3_ray.corpus import Corpus
from eagle3_ray.metrics import CaptureMetrics
from eagle3_ray.runs import RunError, WriterLock
from eagle3_ray.states_cache import STATES, ShardWriter, encode, write_scores
from eagle3_ray.target.endpoints import Endpoint, claim
from eagle3_ray.target.on_policy import OnPolicyLimits, Score, on_policy
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.proof import second_route, self_check
from eagle3_ray.target.protocol import (
    CaptureError,
    States,
    Target,
    TargetDead,
    TargetReplaced,
    TokenSequence,
    in_groups,
)

_PROBES = 2
_SCORES_TOGETHER = 256
_LARGEST_LOADED_TWICE = 4e9  # bytes of weights
_LIVES = 3


@dataclass(frozen=True)
class CaptureSettings:
    """All that a capturing actor needs to know."""

    corpus: Corpus
    target: Path
    layers: tuple[int, ...]
    backend: str
    dtype: str
    gpus: int
    cpus: float
    batch_tokens: int
    temperature: float
    endpoints: tuple[str, ...] = ()
    server_args: tuple[str, ...] = ()
    launch: str = ""
    trust_remote_code: bool = False
    limits: OnPolicyLimits = field(default_factory=OnPolicyLimits)


@dataclass(frozen=True)
class Captured:
    """A sequence's states [T, 4H], the target's likeliest next tokens, and why they must not train, if so.

    `likeliest` is int64 [T]: the target's choice after each token that an answer token follows, -1 after all others.
    """

    row: int
    states: torch.Tensor
    likeliest: torch.Tensor
    score: Score | None  # None where the target cannot read it: its states are zeros
    reason: str | None


class Capturer:
    """A target with the corpus at hand.

    Raises:
        TargetError: no server of capture.endpoints on this machine is free.
        CaptureError: the target does not reproduce the engine's log-probabilities of the corpus's own sequences.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        torch.set_num_threads(max(1, int(settings.cpus)))
        self._settings = settings
        self._endpoint = claim(settings.endpoints) if settings.endpoints else None
        self._corpus = settings.corpus
        parts = load_parts(settings.target, getattr(torch, settings.dtype))
        device = torch.device("cuda" if settings.gpus and torch.cuda.is_available() else "cpu")
        self._parts = replace(parts, lm_head=parts.lm_head.to(device))  # scores are computed where it lies
        self._metrics = CaptureMetrics()
        self._scores: deque[Score] = deque(maxlen=_SCORES_TOGETHER)
        self._target = self._proved()

    def capture(self, rows: Sequence[int]) -> list[Captured]:
        """The states of sequences of the corpus, each proved, in the order given."""
        started = time.monotonic()
        read = [row for row in rows if self._is_read(row)]
        states = self._states([self._sequence(row) for row in read]) if read else []
        by_row = dict(zip(read, states, strict=True))
        found = [self._scored(row, by_row[row]) if row in by_row else self._unread(row) for row in rows]
        self._scores.extend(captured.score for captured in found if captured.score is not None)
        if (reason := self._settings.limits.reason_for_all(self._scores)) is not None:
            raise CaptureError(reason)
        tokens = sum(len(captured.states) for captured in found)
        size = sum(captured.states.nbytes for captured in found)
        self._metrics.captured(len(found), tokens, size, time.monotonic() - started)
        for captured in found:
            if captured.reason is not None:
                self._metrics.set_aside()
        return found

    def _is_read(self, row: int) -> bool:
        longest = self._target.longest
        return longest is None or bool(self._corpus.tokens[row] <= longest)

    def _scored(self, row: int, states: States) -> Captured:
        score = on_policy(
            states,
            self._sequence(row),
            self._corpus.logprobs(row),
            self._parts,
            temperature=self._settings.temperature,
        )
        joined = torch.cat([states.aux_hidden, states.last_hidden], dim=1)
        likeliest = torch.full((len(joined),), -1, dtype=torch.int64)
        likeliest[len(joined) - 1 - score.tokens : -1] = score.likeliest
        return Captured(row, joined, likeliest, score, self._settings.limits.reason(score))

    def _unread(self, row: int) -> Captured:
        tokens, width = int(self._corpus.tokens[row]), STATES * len(self._parts.norm)
        reason = f"{tokens} tokens, and the capturing server reads {self._target.longest}"
        blank = torch.zeros(tokens, width, dtype=getattr(torch, self._settings.dtype))
        return Captured(row, blank, torch.full((tokens,), -1), None, reason)

    def prefill_speed(self, rows: Sequence[int]) -> float:
        """Tokens/s of the target when it reads these sequences and gives nothing away. Raises TargetDead."""
        sequences = [self._sequence(row) for row in rows if self._is_read(row)]
        if not sequences:
            return math.inf
        started = time.monotonic()
        self._target.prefill(sequences)
        return sum(len(sequence.ids) for sequence in sequences) / (time.monotonic() - started)

    def _proved(self) -> Target:
        """The target, once it has reproduced what the engine said of some sequences."""
        target = _open(self._settings, self._endpoint)
        try:
            for number, row in enumerate(_probes(self._corpus)):
                sequence = self._sequence(row)
                self_check(
                    target,
                    self._parts,
                    sequence,
                    self._corpus.logprobs(row),
                    temperature=self._settings.temperature,
                    reference=self._second_route(sequence) if number == 0 else None,
                    limits=self._settings.limits,
                )
        except CaptureError:
            target.close()
            raise
        return target

    def _second_route(self, sequence: TokenSequence) -> States | None:
        """The same states by transformers' own list of hidden states, where the model is small enough to load twice."""
        settings = self._settings
        size = sum(path.stat().st_size for path in settings.target.glob("*.safetensors"))
        if size > _LARGEST_LOADED_TWICE:
            return None
        dtype = getattr(torch, settings.dtype)
        return second_route(settings.target, settings.layers, sequence, dtype, settings.trust_remote_code)

    def _states(self, sequences: list[TokenSequence]) -> list[States]:
        """Captures; an engine that died is replaced, and only what it had in hand is done again."""
        for _ in range(_LIVES):
            try:
                return self._target.capture(sequences)
            except TargetDead as death:
                warnings.warn(f"The target is started again: {death}", TargetReplaced, stacklevel=2)
                self._target.close()
                self._target = self._proved()
        raise TargetDead(
            f"The target died {_LIVES} times over the same sequences, the first is {sequences[0].sequence_id}."
        )

    def packs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """The rows in groups of about a forward pass."""
        return in_groups(rows, lambda row: int(self._corpus.tokens[row]), self._settings.batch_tokens)

    def _sequence(self, row: int) -> TokenSequence:
        return TokenSequence(self._corpus.sequence_id(row), self._corpus.ids(row), int(self._corpus.prompt_tokens[row]))


def _open(settings: CaptureSettings, endpoint: Endpoint | None) -> Target:
    if settings.backend == "transformers":
        from eagle3_ray.target.transformers_backend import TransformersTarget

        return TransformersTarget(
            settings.target,
            settings.layers,
            settings.dtype,
            device=None if settings.gpus else "cpu",
            batch_tokens=settings.batch_tokens,
            trust_remote_code=settings.trust_remote_code,
        )
    from eagle3_ray.target.sglang_backend import SGLangTarget

    if endpoint is not None:
        return SGLangTarget.connect(endpoint.url, settings.target, settings.layers, settings.dtype)
    return SGLangTarget.start(
        settings.target, settings.layers, settings.dtype, settings.server_args, settings.gpus, settings.launch
    )


def _probes(corpus: Corpus) -> list[int]:
    """Short sequences whose log-probabilities were recorded, with an answer long enough to tell models apart."""
    answers = corpus.tokens - corpus.prompt_tokens
    long_enough = np.flatnonzero(answers >= min(16, int(answers.max())))
    order = long_enough[np.argsort(corpus.tokens[long_enough], kind="stable")]
    return [int(row) for row in order[:_PROBES]]


class ShardCapturer:
    """Fills the shards of a cache: the callable of a Ray Data actor pool."""

    def __init__(self, settings: CaptureSettings, folder: str, storage: str, about: dict[str, Any], token: str) -> None:
        self._capturer = Capturer(settings)
        self._corpus = settings.corpus
        self._folder = Path(folder)
        self._storage = storage
        self._about = about
        self._token = token
        self._prefill_speed: float | None = None  # measured behind the first shard, when the target is warm

    def __call__(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, list[Any]]:
        """Captures one shard; a batch holds its `shard` and `rows`. Answers with what was stored."""
        shard, rows = str(batch["shard"][0]), [int(row) for row in batch["rows"][0]]
        started = time.monotonic()
        writer = ShardWriter(self._folder / "shards" / f"{shard}.parquet", self._about)
        scores = []
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always", UserWarning)
                for pack in self._capturer.packs(rows):
                    for captured in self._capturer.capture(pack):
                        scores.append(self._score(captured))
                        if captured.reason is None:
                            sha = self._corpus.token_sha(captured.row)
                            writer.add(captured.row, sha, captured.states, captured.likeliest, self._storage)
            write_scores(self._folder / "scores" / f"{shard}.parquet", scores)
            run_path = str(self._folder.parent)
            if not WriterLock.is_current(run_path, self._token):
                raise RunError(f"another job has taken over {run_path}; this one writes nothing more")
            size = writer.commit()
        except BaseException:
            writer.discard()
            raise
        seconds = time.monotonic() - started
        if self._prefill_speed is None:
            self._prefill_speed = self._capturer.prefill_speed(next(self._capturer.packs(rows)))
        tokens = sum(int(self._corpus.tokens[row]) for row in rows)
        set_aside = sum(score["reason"] is not None for score in scores)
        return {
            "set_aside": [set_aside],
            "tokens": [tokens],
            "bytes": [size],
            "seconds": [seconds],
            "prefill_seconds": [tokens / self._prefill_speed],  # what reading them alone would have taken
            "reasons": [[f"{score['sequence_id']} {score['reason']}" for score in scores if score["reason"]]],
            "notes": [[f"{note.category.__name__} {note.message}" for note in notes]],
        }

    def _score(self, captured: Captured) -> dict[str, Any]:
        figures = ("mean_difference", "worst_window", "relative_difference", "argmax_agreement", "mean_logprob")
        return {
            "row": captured.row,
            "sequence_id": self._corpus.sequence_id(captured.row),
            "tokens": len(captured.states),
            **{name: getattr(captured.score, name, None) for name in figures},
            "reason": captured.reason,
        }


class StreamCapturer:
    """Hands states to trainers as they ask for them: a Ray actor that outlives them, so the target loads once."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._capturer = Capturer(settings)

    def ready(self) -> None:
        """Returns when the target is loaded and has proved itself."""

    def fetch(self, rows: Sequence[int]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64], list[str | None]]:
        """Of `rows`, one behind the other: states as the bits of bfloat16 [T, 4H], likeliest tokens [T]; and why some
        of them must not train.
        """
        found = [captured for pack in self._capturer.packs(rows) for captured in self._capturer.capture(pack)]
        stored, _ = encode(torch.cat([captured.states for captured in found]), "bf16")
        likeliest = torch.cat([captured.likeliest for captured in found]).numpy()
        return stored, likeliest, [captured.reason for captured in found]
