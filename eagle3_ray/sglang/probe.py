"""Does this server hand over exactly the target's tokens? Measured before the first row, and when a server comes back.

The order matters: a server with a smaller vocabulary dies of an id that it does not have (sglang 0.5.23), so the probe
asks for the vocabulary first, then sends text, and ids only after the server's tokenizer has shown that it knows them.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import aiohttp

from eagle3_ray.sglang.protocol import (
    Answer,
    Refused,
    Sampling,
    Transient,
    Unauthorized,
    WrongAnswer,
    check,
    request_body,
)
from eagle3_ray.sglang.transport import get, post

_FORCE = 1e4  # logit bias that makes a token certain
_LONGEST_S = 300  # a fit server may be busy with another job's requests
_SAME_MODEL = 0.2  # nats; mean difference of a fixed prompt's log-probabilities between servers of one model
_TOKEN_SETTINGS = ("version", "dtype", "quantization", "kv_cache_dtype", "json_model_override_args")


class Unfit(Exception):
    """The server does not hand over the target's tokens; the message says what was seen and what to change."""


@dataclass(frozen=True)
class ProbeMaterial:
    """What the probe sends and what must come back; made once from the target's own files.

    `text` and `text_ids`: a text with special tokens in it, and its ids. `prompt_ids`: a rendered chat prompt.
    `forced_ids`: tokens that a server might filter (reasoning boundaries, stop tokens, other control tokens).
    """

    model: str
    served_as: str | None
    architectures: tuple[str, ...]
    text: str
    text_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServerFacts:
    """What a fit server is: its room, its identity, and the evidence that it shares the model with its siblings."""

    url: str
    weight_version: str
    capacity_tokens: int
    max_running: int
    longest_input: int
    context: int
    settings: Mapping[str, str | int | float | bool | None]
    prompt_logprobs: tuple[float, ...]
    greedy_ids: tuple[int, ...]
    warnings: list[str] = field(default_factory=list)

    def longest_prompt(self, max_new_tokens: int) -> int:
        """Most prompt tokens beside a full answer.

        sglang 0.5.23 cuts an answer silently at context - 2 - prompt, and refuses a prompt of max_req_input_len tokens.
        """
        return min(self.context - 2 - max_new_tokens, self.capacity_tokens - max_new_tokens, self.longest_input - 1)


async def probe(session: aiohttp.ClientSession, url: str, material: ProbeMaterial, sampling: Sampling) -> ServerFacts:
    """Measures one server; about a dozen short requests.

    Raises:
        Unfit: evidence that it is not what the run needs.
        Transient: it cannot be reached, is not ready, or hangs.
    """
    try:
        async with asyncio.timeout(_LONGEST_S):
            return await _probe(session, url, material, sampling)
    except TimeoutError:
        raise Transient("timeout", f"the probe took more than {_LONGEST_S} s") from None


async def _probe(session: aiohttp.ClientSession, url: str, material: ProbeMaterial, sampling: Sampling) -> ServerFacts:
    try:
        model = await _info(session, f"{url}/model_info")
        server = await _info(session, f"{url}/server_info")
        served = await _info(session, f"{url}/v1/models")
        _check_model(model, material)
        room = _check_room(server, served, sampling)
        warnings = _parser_warnings(model)
        await _check_vocabulary(session, url, sampling)
        warnings += await _check_tokenizer(session, url, material)
        facts = await _check_prompt(session, url, material, sampling)
        await _check_forced_tokens(session, url, material, sampling)
    except Refused as refused:
        raise Unfit(f"it refuses a probe request: {refused}. Is it a stock SGLang 0.5.23 or later?") from None
    except Unauthorized as error:
        if error.status == 404:
            raise Unfit(f"it lacks a path of SGLang: {error}. Is it a stock SGLang 0.5.23, asked directly?") from None
        raise Unfit(f"it lets nobody in: {error}. Set generate.api_key_env to the variable with its key.") from None
    settings = {f"engine.{name}": server.get(name) for name in _TOKEN_SETTINGS}
    answer, prompt_logprobs = facts
    return ServerFacts(
        url,
        answer.weight_version,
        room["capacity"],
        room["running"],
        room["longest"],
        room["context"],
        {**settings, "engine.weight_version": answer.weight_version},
        prompt_logprobs,
        tuple(answer.output_ids),
        warnings,
    )


def compare(facts: Sequence[ServerFacts]) -> list[str]:
    """Holds servers of one run against each other; returns warnings.

    Raises:
        Unfit: two of them do not serve the same weights, version or settings.
    """
    warnings = []
    for other in facts[1:]:
        first = facts[0]
        for name, value in first.settings.items():
            if other.settings[name] != value:
                raise Unfit(
                    f"{first.url} has {name.removeprefix('engine.')} {value!r}, {other.url} has "
                    f"{other.settings[name]!r}; a run needs servers of one kind."
                )
        difference = logprob_difference(first.prompt_logprobs, other.prompt_logprobs)
        if difference > _SAME_MODEL:
            raise Unfit(
                f"{first.url} and {other.url} do not serve the same model: the log-probabilities of one prompt differ "
                f"by {difference:.2f} nats a token (more than {_SAME_MODEL})."
            )
        if first.greedy_ids != other.greedy_ids:
            warnings.append(
                f"{first.url} and {other.url} answer a greedy probe differently; a near tie in bf16 can do that."
            )
    return warnings


def logprob_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute difference, in nats a token; infinite where the lengths differ."""
    if len(a) != len(b):
        return float("inf")
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(1, len(a))


def same_model(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two servers' log-probabilities of the probe prompt can come from one model."""
    return logprob_difference(a, b) <= _SAME_MODEL


def _check_model(model: Mapping[str, Any], material: ProbeMaterial) -> None:
    path = str(model.get("model_path", ""))
    wanted = material.served_as or material.model
    if PurePath(path).name != PurePath(wanted).name:
        raise Unfit(
            f"the server serves {path!r}, not {wanted!r}. Start it with the target, or set target.served_as={path} "
            "if these are the target's weights under another name."
        )
    architectures = tuple(model.get("architectures") or ())
    if material.architectures and architectures and architectures != material.architectures:
        raise Unfit(
            f"the server's model is a {architectures}, the target in target.model is a {material.architectures}."
        )


def _check_room(server: Mapping[str, Any], served: Mapping[str, Any], sampling: Sampling) -> dict[str, int]:
    ranks = len(server.get("internal_states") or [None])
    try:
        capacity = int(server["max_total_num_tokens"])
        longest = int(server["max_req_input_len"])
        context = int(served["data"][0]["max_model_len"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise Unfit(f"its /server_info or /v1/models lacks {error}. Is it a stock SGLang 0.5.23 or later?") from None
    room = min(context, capacity)
    if sampling.max_new_tokens + 8 > room:
        raise Unfit(
            f"generate.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in its {room} tokens "
            "(context or KV cache). Lower it or start the server with more."
        )
    running = [state.get("effective_max_running_requests_per_dp") for state in server.get("internal_states") or []]
    limit = sum(r for r in running if isinstance(r, int)) or int(server.get("max_running_requests") or 2048)
    return {"capacity": capacity * ranks, "running": limit, "longest": longest, "context": context}


def _parser_warnings(model: Mapping[str, Any]) -> list[str]:
    return [
        f"the server has {name}={model[name]}; the probe shows that its answers here are complete all the same"
        for name in ("reasoning_parser", "tool_call_parser")
        if model.get(name)
    ]


async def _info(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    body = await get(session, url)
    if not isinstance(body, dict):
        raise Unfit(f"{url} answers {str(body)[:80]!r}, which no SGLang does.")
    return body


async def _check_vocabulary(session: aiohttp.ClientSession, url: str, sampling: Sampling) -> None:
    """A bias on an id that the model does not have is refused (sglang 0.5.23: HTTP 400), before any harm is done."""

    async def refusal_of(token: int) -> Refused | None:
        params = {"max_new_tokens": 1, "temperature": 0, "logit_bias": {str(token): 0.0}}
        try:
            await post(session, f"{url}/generate", {"rid": _rid(), "input_ids": [0], "sampling_params": params})
        except Refused as refused:
            return refused
        return None

    last = sampling.vocab_size - 1
    if refused := await refusal_of(last):
        raise Unfit(f"the target's vocabulary has {last + 1} tokens, the server's is smaller: {refused}")
    if not await refusal_of(last + 1):
        raise Unfit(f"the target's vocabulary has {last + 1} tokens, the server's is larger. Serve the target itself.")


async def _check_tokenizer(session: aiohttp.ClientSession, url: str, material: ProbeMaterial) -> list[str]:
    body = {
        "rid": _rid(),
        "text": material.text,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_prompt_token_ids": True,
    }
    try:
        answer = await post(session, f"{url}/generate", body)
    except Refused:  # --skip-tokenizer-init
        return ["the server takes no text, so its tokenizer could not be compared"]
    ids = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
    if ids is None:
        raise Unfit("the server does not echo prompt_token_ids. It has to be SGLang 0.5.23 or later, asked directly.")
    if tuple(ids) != material.text_ids:
        raise Unfit(
            f"the server's tokenizer turns a text into {_short(ids)}, the one in target.model into "
            f"{_short(material.text_ids)}. Serve the target's own tokenizer."
        )
    return []


async def _check_prompt(
    session: aiohttp.ClientSession, url: str, material: ProbeMaterial, sampling: Sampling
) -> tuple[Answer, tuple[float, ...]]:
    """A greedy answer that passes every check, and the log-probabilities of the prompt's own tokens."""
    rid, greedy = _rid(), replace(sampling, max_new_tokens=16, temperature=0.0, logprobs=True)
    body = {**request_body(rid, material.prompt_ids, greedy), "logprob_start_len": 0}
    reply = await post(session, f"{url}/generate", body)
    answer = _checked(reply, rid, material.prompt_ids, greedy)
    entries = reply["meta_info"].get("input_token_logprobs") or []
    if [entry[1] for entry in entries] != list(material.prompt_ids):
        raise Unfit("the ids in input_token_logprobs are not the prompt that was sent: the server alters prompts.")
    logprobs = tuple(entry[0] for entry in entries[1:])
    if not all(isinstance(logprob, float | int) for logprob in logprobs):
        raise Unfit("a log-probability of the prompt is no number: the server computes NaN.")
    return answer, logprobs


async def _check_forced_tokens(
    session: aiohttp.ClientSession, url: str, material: ProbeMaterial, sampling: Sampling
) -> None:
    """Each token that a server might filter is forced with a logit bias and has to come back, in ids and log-probs."""

    async def force(token: int) -> None:
        rid, forced = _rid(), replace(sampling, max_new_tokens=2, temperature=0.0, logprobs=True)
        body = request_body(rid, material.prompt_ids, forced)
        body["sampling_params"]["logit_bias"] = {str(token): _FORCE}
        reply = await post(session, f"{url}/generate", body)
        returned = reply.get("output_ids") if isinstance(reply, dict) else None
        wanted = [token] if token in sampling.stop_ids else [token, token]
        try:
            answer = check(reply, rid, material.prompt_ids, forced)
            fault = "" if answer.output_ids == wanted else "the server filters or replaces tokens"
        except WrongAnswer as wrong:
            fault = wrong.detail
        if fault:
            raise Unfit(
                f"token {token} was forced and {returned} came back instead of {wanted}: {fault}. Start the server "
                "without --enable-strict-thinking and without custom logit processors."
            )

    await asyncio.gather(*(force(token) for token in material.forced_ids))


def _checked(reply: Any, rid: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
    try:
        return check(reply, rid, prompt_ids, sampling)
    except WrongAnswer as error:
        raise Unfit(f"a probe request got a {error}") from None


def _rid() -> str:
    return f"probe-{uuid.uuid4().hex}"


def _short(ids: Sequence[int]) -> str:
    return str(list(ids[:12])) + ("..." if len(ids) > 12 else "")
