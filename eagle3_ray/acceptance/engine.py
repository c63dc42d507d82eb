"""Measures in a running SGLang: what it answers, what its drafts were worth, and how fast it was.

Prompt ids go to `/generate`, one request a prompt; each answer passes the checks of `sglang/protocol.py`. The counts of
its verify steps come from `meta_info` (sglang 0.5.23: `spec_verify_ct`, `spec_correct_drafts_histogram`; both are
absent where an answer needed no verify step, and on a server that has no drafter). This module starts no server.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from eagle3_ray.acceptance.questions import EvalPrompt, Question, turn_prompts
from eagle3_ray.acceptance.tally import Acceptance
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.rendering import Renderer
from eagle3_ray.run_log import say
from eagle3_ray.sglang.protocol import (
    Refused,
    RequestFailed,
    Sampling,
    Transient,
    Unauthorized,
    WrongAnswer,
    check,
    request_body,
)
from eagle3_ray.sglang.transport import ask, open_session, post

_ATTEMPTS = 4
_SAY_EVERY_S = 10.0
_WAIT_S = 2.0  # before the second attempt; doubles


class EngineFailed(RuntimeError):
    """The engine does not answer, or not as SGLang does; nothing can be measured with it."""


@dataclass(frozen=True)
class EngineInfo:
    """What a server says of itself; `algorithm` is None where it decodes plainly."""

    algorithm: str | None
    draft_model: str | None
    steps: int | None
    topk: int | None
    model: str
    dtype: str
    version: str


@dataclass(frozen=True)
class Served:
    """One answer of an engine; `acceptance` is None where it had no drafter."""

    prompt: EvalPrompt
    output_ids: tuple[int, ...]
    finish_reason: str
    acceptance: Acceptance | None


@dataclass(frozen=True)
class Measured:
    """All answers to a prompt set, in its order, with `concurrency` requests in flight."""

    served: tuple[Served, ...]
    concurrency: int
    wall_s: float

    @property
    def output_tokens(self) -> int:
        return sum(len(one.output_ids) for one in self.served)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.wall_s


def engine_info(url: str, api_key: str | None = None) -> EngineInfo:
    """Asks `/server_info`.

    Raises:
        EngineFailed: no answer, or not SGLang's.
    """
    try:
        said = ask(f"{url}/server_info", api_key=api_key)
        return EngineInfo(
            algorithm=said["speculative_algorithm"],
            draft_model=said["speculative_draft_model_path"],
            steps=said["speculative_num_steps"],
            topk=said["speculative_eagle_topk"],
            model=said["model_path"],
            dtype=said["dtype"],
            version=said["version"],
        )
    except RequestFailed as error:
        raise EngineFailed(f"{url} does not answer /server_info ({error}). Is SGLang running there?") from None
    except (KeyError, TypeError) as error:
        raise EngineFailed(f"{url}: /server_info has no {error}; this was written for sglang 0.5.23.") from None


def measure(
    url: str, prompts: Sequence[EvalPrompt], sampling: Sampling, concurrency: int, api_key: str | None = None
) -> Measured:
    """Sends every prompt, `concurrency` at a time.

    Raises:
        EngineFailed: a request is refused, or fails several times over.
        PromptSourceError: a prompt has an id outside the vocabulary, which would kill the server (sglang 0.5.23).
    """
    for prompt in prompts:
        if wrong := [token for token in prompt.prompt_ids if not 0 <= token < sampling.vocab_size]:
            raise PromptSourceError(
                f"{prompt.name}: token id {wrong[0]} is outside the vocabulary of {sampling.vocab_size}."
            )
    return asyncio.run(_measure(url, prompts, sampling, concurrency, api_key))


def answer_conversations(
    url: str,
    questions: Sequence[Question],
    renderer: Renderer,
    sampling: Sampling,
    concurrency: int,
    api_key: str | None = None,
) -> Measured:
    """Answers all turns: turn 0 of every question, then turn 1 of those that have one, and so on.

    The prompts that come out are the ones to measure everything else on. `wall_s` is the time of the requests alone.

    Raises:
        EngineFailed: see `measure`.
        PromptSourceError: the chat template refuses a row; see `measure`.
    """
    answers: dict[str, Sequence[int]] = {}
    served: list[Served] = []
    wall_s = 0.0
    for turn in range(max((question.turns for question in questions), default=0)):
        prompts = turn_prompts(questions, renderer, answers, turn)
        measured = measure(url, prompts, sampling, concurrency, api_key)
        answers |= {one.prompt.name: one.output_ids for one in measured.served}
        served += measured.served
        wall_s += measured.wall_s
    return Measured(tuple(served), concurrency, wall_s)


async def _measure(
    url: str, prompts: Sequence[EvalPrompt], sampling: Sampling, concurrency: int, api_key: str | None
) -> Measured:
    free = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: EvalPrompt) -> Served:
        async with free:
            return await _ask(session, url, prompt, sampling)

    async def tell() -> None:
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            done = [task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()]
            speed = sum(len(one.output_ids) for one in done) / (time.perf_counter() - started)
            say(f"  {len(done)}/{len(tasks)} answers, {speed:.0f} tokens/s")

    async with open_session(api_key, timeout_s=3600) as session:
        started = time.perf_counter()
        tasks: list[asyncio.Task[Served]] = []
        telling = asyncio.get_running_loop().create_task(tell())
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(one(session, prompt)) for prompt in prompts]
        except* EngineFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            telling.cancel()
        wall_s = time.perf_counter() - started
    return Measured(tuple(task.result() for task in tasks), concurrency, wall_s)


async def _ask(session: aiohttp.ClientSession, url: str, prompt: EvalPrompt, sampling: Sampling) -> Served:
    for attempt in range(_ATTEMPTS):
        rid = uuid.uuid4().hex
        try:
            body = await post(session, f"{url}/generate", request_body(rid, prompt.prompt_ids, sampling))
            return read_answer(body, rid, prompt, sampling)
        except (Refused, Unauthorized) as error:
            raise EngineFailed(f"{url} refuses {prompt.name} ({len(prompt.prompt_ids)} tokens): {error}") from None
        except Transient as error:
            failure = error
            await asyncio.sleep(_WAIT_S * 2**attempt)
    raise EngineFailed(f"{url} failed {_ATTEMPTS} times on {prompt.name}: {failure}")


def read_answer(body: Any, rid: str, prompt: EvalPrompt, sampling: Sampling) -> Served:
    """The answer in a 200 body, checked as any other, and the counts of its verify steps.

    Raises:
        Transient, WrongAnswer: see `sglang.protocol.check`; also for counts that contradict the answer.
    """
    meta = body.get("meta_info") if isinstance(body, dict) else None
    counters = {name: meta[name] for name in meta if name.startswith("spec_")} if isinstance(meta, dict) else {}
    if counters and isinstance(meta, dict):  # `check` takes them for a mistake: training data comes from plain servers
        body = {**body, "meta_info": {name: value for name, value in meta.items() if name not in counters}}
    answer = check(body, rid, prompt.prompt_ids, sampling)
    retractions = body["meta_info"].get("num_retractions", 0)  # a request that lost its place is prefilled anew
    if type(retractions) is not int:
        raise WrongAnswer(f"num_retractions is {retractions!r}, no whole number")
    prefills = 1 + retractions
    acceptance = _acceptance(counters, len(answer.output_ids) - prefills)
    return Served(prompt, tuple(answer.output_ids), answer.finish_reason, acceptance)


def _acceptance(counters: Mapping[str, Any], tokens: int) -> Acceptance | None:
    if not counters:
        return None
    try:
        histogram = tuple(int(steps) for steps in counters["spec_correct_drafts_histogram"])
        return Acceptance(1, tokens, counters["spec_verify_ct"], histogram)
    except KeyError as error:
        raise WrongAnswer(f"meta_info has speculation counters but no {error}; use sglang 0.5.23") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise WrongAnswer(f"the speculation counters contradict the answer: {error}") from None
