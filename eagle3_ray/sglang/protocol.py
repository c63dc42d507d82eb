"""One request to SGLang's native `/generate`, and the checks that its answer has to pass before anybody may use it.

Ids in, ids out; the answer's text is never read. Field names and behaviour are those of sglang 0.5.23.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST = -3e38  # the lowest log-probability that the float32 of a row can hold


class RequestFailed(Exception):
    """A server did not answer a request as asked; which of its kinds it is says what to do about it."""


class Transient(RequestFailed):
    """Worth another try: connection loss, 429, 5xx, a timeout, an abort. `retry_after_s` is the server's own wish."""

    def __init__(self, cause: str, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(cause, detail, retry_after_s)
        self.cause = cause
        self.detail = detail
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


class WrongAnswer(Transient):
    """HTTP 200 with an answer that contradicts itself or the request. Never stored."""

    def __init__(self, detail: str) -> None:
        super().__init__("wrong answer", detail)
        self.args = (detail,)  # what pickle calls this class with


class Refused(RequestFailed):
    """The server will never take this request (HTTP 400): the row is at fault."""


class Unauthorized(RequestFailed):
    """HTTP 401, 403, 404 and their like: the setup is at fault, no row will get through."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.detail}"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, and which token ids exist and end an answer."""

    max_new_tokens: int
    temperature: float
    top_p: float
    logprobs: bool
    vocab_size: int
    stop_ids: frozenset[int]

    def params(self) -> dict[str, Any]:
        """`sampling_params` with every field that a server's own defaults could change."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": sorted(self.stop_ids),
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        }


@dataclass(frozen=True)
class Answer:
    """A checked answer. `output_ids` ends with the stop token exactly where `finish_reason` is "stop"."""

    output_ids: list[int]
    output_logprobs: list[float] | None
    finish_reason: str
    matched_stop: int | None
    weight_version: str


def request_body(rid: str, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """The JSON body of a request; `rid` shows in the server's log and makes repeated requests visible."""
    return {
        "rid": rid,
        "input_ids": list(prompt_ids),
        "sampling_params": sampling.params(),
        "return_logprob": sampling.logprobs,
        "return_prompt_token_ids": True,
    }


def check(body: Any, rid: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
    """The answer in a 200 body.

    Raises:
        Transient: the request was aborted (sglang: HTTP 200, finish reason "abort", partial ids).
        WrongAnswer: something contradicts the request or itself; says what.
    """
    try:
        meta, ids = body["meta_info"], body["output_ids"]
        finish = meta["finish_reason"]
        kind, matched = finish["type"], finish.get("matched")
        answered, counted = meta["prompt_tokens"], meta["completion_tokens"]
        echo = body["prompt_token_ids"]
        weight_version = str(meta["weight_version"])
    except (KeyError, TypeError) as error:
        raise WrongAnswer(f"the field {error} is missing or of another type") from None
    if kind == "abort":
        raise Transient("abort", str(finish.get("message", "")))
    if meta.get("id") != rid:
        raise WrongAnswer(f"it answers request {meta.get('id')}, not {rid}")
    if answered != len(prompt_ids) or echo != list(prompt_ids):
        raise WrongAnswer(f"the server read {answered} prompt tokens that are not the {len(prompt_ids)} sent")
    if "spec_verify_ct" in meta:
        raise WrongAnswer("the server decodes speculatively; start it without --speculative-algorithm")
    _check_ids(ids, counted, sampling)
    _check_finish(kind, matched, ids, sampling)
    logprobs = _checked_logprobs(meta, ids) if sampling.logprobs else None
    return Answer(ids, logprobs, kind, matched if kind == "stop" else None, weight_version)


def _check_ids(ids: Any, counted: Any, sampling: Sampling) -> None:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise WrongAnswer("output_ids is not a list of whole numbers")
    if not ids:
        raise WrongAnswer("output_ids is empty: not even a stop token")
    if counted != len(ids):
        raise WrongAnswer(f"completion_tokens is {counted}, but there are {len(ids)} output ids")
    outside = [token for token in ids if not 0 <= token < sampling.vocab_size]
    if outside:
        raise WrongAnswer(f"output id {outside[0]} is outside the vocabulary of {sampling.vocab_size}")


def _check_finish(kind: Any, matched: Any, ids: list[int], sampling: Sampling) -> None:
    early = next((token for token in ids[:-1] if token in sampling.stop_ids), None)
    if early is not None:
        raise WrongAnswer(f"the answer goes on behind stop token {early}")
    if kind == "stop":
        if type(matched) is not int or matched != ids[-1] or matched not in sampling.stop_ids:
            raise WrongAnswer(f"finish reason stop matched {matched!r}, but the answer ends in {ids[-1]}")
    elif kind == "length":
        if len(ids) != sampling.max_new_tokens:
            raise WrongAnswer(f"finish reason length after {len(ids)} of {sampling.max_new_tokens} tokens")
        if ids[-1] in sampling.stop_ids:
            raise WrongAnswer(f"finish reason length, but the answer ends in stop token {ids[-1]}")
    else:
        raise WrongAnswer(f"unknown finish reason {kind!r}")


def _checked_logprobs(meta: dict[str, Any], ids: list[int]) -> list[float]:
    try:
        pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
    except (KeyError, TypeError, IndexError):
        raise WrongAnswer("output_token_logprobs is missing or malformed") from None
    if [token for _, token in pairs] != ids:
        raise WrongAnswer("the ids in output_token_logprobs are not the output ids")
    values = [value for value, _ in pairs]
    if not all(type(value) in (int, float) and _LEAST < value <= 1e-3 for value in values):  # NaN arrives as null
        raise WrongAnswer("a log-probability is not a number of at most 0")
    return values
