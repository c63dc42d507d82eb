"""What the stand-in answers, as pure functions: the "model", its log-probabilities, the JSON, and ways to spoil it.

Knows ids and dictionaries; knows nothing of HTTP, time or queues (`fake_engine.py` and `fake_http.py` do). Shapes were
copied from a running SGLang 0.5.23; the file named in a docstring is where that behaviour lives under `sglang/srt`.

The model is a hash, not a function of its prefix: `answer(prompt + answer[:k])` is *not* the rest of `answer(prompt)`.
Its log-probabilities do depend on the prefix only, so scoring `prompt + output` as a prompt gives the output's own
log-probabilities back, as a real engine does up to rounding.
"""

import hashlib
import json
import math
import random
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

LENGTH_SIGMA = 0.6
BIAS_THAT_FORCES = 50.0
_MASK = (1 << 64) - 1


def ordinary_range(vocab_size: int) -> range:
    """Ids that the model writes of its own accord: away from both ends, where tokenizers keep special tokens."""
    return range(vocab_size // 8, max(vocab_size // 2, vocab_size // 8 + 2))


def answer(
    prompt_ids: Sequence[int],
    *,
    vocab_size: int,
    eos_id: int,
    max_new_tokens: int,
    mean_tokens: float,
    seed: int | str = 0,
    forced_id: int | None = None,
    stop_ids: Collection[int] = (),
    ignore_eos: bool = False,
    min_new_tokens: int = 0,
) -> tuple[list[int], JsonObject]:
    """The output ids for a prompt and SGLang's `finish_reason` for them.

    A larger `max_new_tokens` continues the same ids. Stop rules mirror `schedule_batch.py: _check_token_based_finish`:
    the stop token is part of the output, `ignore_eos` switches off `stop_ids` as well, and `matched` is the token.
    """
    digest = hashlib.sha256(f"{seed}|".encode() + array("q", prompt_ids).tobytes()).digest()
    rng = random.Random(int.from_bytes(digest))
    length = round(mean_tokens * math.exp(LENGTH_SIGMA * rng.gauss(0.0, 1.0) - LENGTH_SIGMA**2 / 2))
    length = max(length, 2, min_new_tokens + 1)  # a stop token alone is an empty answer, which audit rejects
    ordinary = ordinary_range(vocab_size)
    endless = ignore_eos or forced_id is not None
    ids = rng.choices(ordinary, k=max_new_tokens if endless else min(length, max_new_tokens))
    ids = [ordinary[0] + (token == ordinary[0]) if token == eos_id else token for token in ids]
    if forced_id is not None:
        free = 0 if ignore_eos or forced_id not in {eos_id, *stop_ids} else min(min_new_tokens, len(ids))
        ids[free:] = [forced_id] * (len(ids) - free)
    elif not ignore_eos and len(ids) == length:
        ids[-1] = eos_id
    if not ignore_eos:
        stops = {eos_id, *stop_ids}
        for position in range(min_new_tokens, len(ids)):
            if ids[position] in stops:
                return ids[: position + 1], {"type": "stop", "matched": ids[position]}
    return ids, {"type": "length", "length": len(ids)}


@lru_cache(maxsize=1)
def real_answers(path: str) -> dict[tuple[int, ...], tuple[list[int], list[float], JsonObject]]:
    """What a real model answers to some prompts: JSON lines of [prompt ids, output ids, log-probabilities, finish]."""
    lines = map(json.loads, Path(path).read_text().splitlines())
    return {tuple(prompt_ids): (ids, logprobs, finish) for prompt_ids, ids, logprobs, finish in lines}


def token_logprobs(ids: Sequence[int], start: int, *, model_seed: int) -> list[float]:
    """Log-probabilities of `ids[start:]`, each a function of the model seed, the ids before it and itself."""
    state = int.from_bytes(hashlib.sha256(f"model {model_seed}".encode()).digest()[:8])
    logprobs = []
    for position, token in enumerate(ids):
        state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 31
        if position >= start:
            logprobs.append(round(-8.0 * state / _MASK, 6))
    return logprobs


@dataclass
class Generation:
    """One prompt with what was generated for it; faults that a server applies consistently change this."""

    prompt_ids: list[int]
    ids: list[int]
    finish: JsonObject
    logprobs: list[float]  # empty unless asked for

    def remove(self, positions: Collection[int]) -> None:
        """Filter tokens as a server would: ids, counts and log-probabilities shrink together."""
        kept = [p for p in range(len(self.ids)) if p not in positions]
        self.ids = [self.ids[p] for p in kept]
        self.logprobs = [self.logprobs[p] for p in kept if p < len(self.logprobs)]

    def put(self, position: int, token: int) -> None:
        """Replace a token, or add one to an empty output."""
        self.ids[position : position + 1] = [token]
        if self.logprobs:
            self.logprobs[position : position + 1] = [-0.5]


@dataclass(frozen=True)
class Vocabulary:
    """What the spoilings need to know of the options."""

    size: int
    eos_id: int
    strip_ids: tuple[int, ...] = ()


def render(
    generation: Generation,
    *,
    rid: str,
    text: str,
    weight_version: str,
    model_seed: int,
    return_logprob: bool,
    logprob_start_len: int,
    echo_prompt: bool,
    e2e_latency: float,
    now: float,
) -> JsonObject:
    """The body of a 200 answer of `/generate` (`managers/tokenizer_manager.py: _handle_batch_output`)."""
    ids, prompt_ids = generation.ids, generation.prompt_ids
    meta: JsonObject = {
        "id": rid,
        "finish_reason": dict(generation.finish),
        "prompt_tokens": len(prompt_ids),
        "weight_version": weight_version,
        "num_retractions": 0,
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        if 0 <= logprob_start_len < len(prompt_ids):
            start = logprob_start_len
            scores = [None, *token_logprobs(prompt_ids, start + 1, model_seed=model_seed)]
            meta["input_token_logprobs"] = [[s, t, None] for s, t in zip(scores, prompt_ids[start:], strict=True)]
        meta["output_token_logprobs"] = [[s, t, None] for s, t in zip(generation.logprobs, ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_versions": [{"version": weight_version, "start": 0, "end": len(ids)}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": e2e_latency,
        "response_sent_to_client_ts": now,
    }
    out: JsonObject = {"text": text, "output_ids": list(ids), "meta_info": meta}
    return out | {"prompt_token_ids": list(prompt_ids)} if echo_prompt else out


# ---- faults of a server that is wrong consistently: ids, counts and log-probabilities agree with each other


def _abort(gen: Generation, vocab: Vocabulary) -> None:
    """`schedule_batch.py: FINISH_ABORT`, seen with `/abort_request` on a running request."""
    gen.remove(range(len(gen.ids) // 2, len(gen.ids)))
    gen.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _drop_token_consistent(gen: Generation, vocab: Vocabulary) -> None:
    gen.remove({len(gen.ids) // 2})


def _drop_eos(gen: Generation, vocab: Vocabulary) -> None:
    if gen.finish["type"] == "stop":
        gen.remove({len(gen.ids) - 1})
    gen.finish = {"type": "stop", "matched": vocab.eos_id}


def _invent_eos(gen: Generation, vocab: Vocabulary) -> None:
    """`fake_engine.py` generates to the limit first."""
    gen.put(len(gen.ids), vocab.eos_id)


def _id_out_of_range(gen: Generation, vocab: Vocabulary) -> None:
    gen.put(len(gen.ids) // 2, vocab.size + 7)


def _negative_id(gen: Generation, vocab: Vocabulary) -> None:
    gen.put(len(gen.ids) // 2, -1)


def _empty_output(gen: Generation, vocab: Vocabulary) -> None:
    gen.remove(range(len(gen.ids)))
    gen.finish = {"type": "stop", "matched": vocab.eos_id}


def _strip_token(gen: Generation, vocab: Vocabulary) -> None:
    gen.remove({p for p, token in enumerate(gen.ids) if token in vocab.strip_ids})


CONSISTENT_FAULTS: dict[str, Callable[[Generation, Vocabulary], None]] = {
    "abort": _abort,
    "drop_token_consistent": _drop_token_consistent,
    "drop_eos": _drop_eos,
    "invent_eos": _invent_eos,
    "id_out_of_range": _id_out_of_range,
    "negative_id": _negative_id,
    "empty_output": _empty_output,
    "strip_token": _strip_token,
}


# ---- faults inside one body: two fields of it disagree, or one is nonsense


def _wrong_count(out: JsonObject) -> None:
    out["meta_info"]["completion_tokens"] += 1


def _wrong_prompt_tokens(out: JsonObject) -> None:
    out["meta_info"]["prompt_tokens"] += 1


def _drop_token(out: JsonObject) -> None:
    middle = len(out["output_ids"]) // 2
    del out["output_ids"][middle : middle + 1]


def _unknown_finish(out: JsonObject) -> None:
    out["meta_info"]["finish_reason"] = {"type": "mystery"}


def _null_output(out: JsonObject) -> None:
    out["output_ids"] = None


def _other_weight_version(out: JsonObject) -> None:
    out["meta_info"]["weight_version"] = "other"
    out["meta_info"]["weight_versions"][0]["version"] = "other"


def _logprob_mismatch(out: JsonObject) -> None:
    scores = out["meta_info"].get("output_token_logprobs") or [[0.0, 0, None]]
    scores[len(scores) // 2][1] += 1


def _nan_logprob(out: JsonObject) -> None:
    """A NaN reaches the client as `null`: `utils/json_response.py` writes with orjson."""
    scores = out["meta_info"].get("output_token_logprobs") or [[0.0, 0, None]]
    scores[len(scores) // 2][0] = None


def _speculative(out: JsonObject) -> None:
    """`managers/tokenizer_manager.py: _calculate_spec_decoding_metrics`, for 4 draft tokens of which 1 is accepted."""
    tokens = max(out["meta_info"]["completion_tokens"], 1)
    verify_ct = (tokens + 1) // 2
    correct, proposed = tokens - verify_ct, verify_ct * 3
    out["meta_info"] |= {
        "spec_accept_rate": correct / proposed,
        "spec_accept_length": tokens / verify_ct,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": verify_ct,
        "spec_correct_drafts_histogram": [verify_ct - correct, correct],
    }


def _alter_text_only(out: JsonObject) -> None:
    out["text"] += " (altered)"


BODY_FAULTS: dict[str, Callable[[JsonObject], None]] = {
    "wrong_count": _wrong_count,
    "wrong_prompt_tokens": _wrong_prompt_tokens,
    "drop_token": _drop_token,
    "unknown_finish": _unknown_finish,
    "null_output": _null_output,
    "other_weight_version": _other_weight_version,
    "logprob_mismatch": _logprob_mismatch,
    "nan_logprob": _nan_logprob,
    "speculative": _speculative,
    "alter_text_only": _alter_text_only,
}
