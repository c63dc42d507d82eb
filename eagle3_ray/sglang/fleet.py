"""The servers that one generating actor talks to: which is healthy, which has room, and what becomes of a request.

Admission is by tokens. A request needs its prompt and the answer length that its partition has shown so far; a server
takes requests up to a budget of tokens, which follows what `/v1/loads` says: it grows while nothing waits there and
shrinks while more waits than keeps the server busy. Short and long requests mix freely; nobody sets a concurrency.
"""

import asyncio
import logging
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from eagle3_ray.errors import StoppedEarly
from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, probe, same_model
from eagle3_ray.sglang.protocol import Answer, Refused, Sampling, Transient, Unauthorized, check, request_body
from eagle3_ray.sglang.transport import get, post

logger = logging.getLogger(__name__)

_FEEDBACK_S = 1.0
_FAILURES_UNTIL_DOWN = 3
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_FULL = 0.85  # token usage from which on sglang may have to retract requests
_LOOK_TIMEOUT_S = 5.0
_SILENT_LOOKS = 12  # timeouts of /v1/loads in a row, about a minute, until a server counts as hung


class RowFailed(Exception):
    """Every attempt failed; the row waits for the next run."""


class NoServer(StoppedEarly):
    """No server has answered for longer than generate.outage_limit_s, or none is fit any more."""


@dataclass
class Load:
    """The last answer of `/v1/loads`, summed over data-parallel ranks."""

    running: int = 0
    waiting: int = 0
    token_usage: float = 0.0
    tokens_per_second: float = 0.0


@dataclass
class Endpoint:
    """One server as this actor sees it. Room, budget and reserved are tokens; room is our share of its KV cache."""

    facts: ServerFacts
    room: float
    most_requests: int
    budget: float
    healthy: bool = True
    unfit: str | None = None
    withdrawn: bool = False
    in_flight: int = 0
    reserved: int = 0
    failures: int = 0
    load: Load = field(default_factory=Load)
    answers: int = 0
    output_tokens: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    silent_looks: int = 0
    posts: set[asyncio.Task[Any]] = field(default_factory=set)
    watchers: set[asyncio.Task[None]] = field(default_factory=set)

    def has_room(self, tokens: int) -> bool:
        """Whether a request of that size may go there now; an idle server takes any."""
        if not self.healthy or self.in_flight >= self.most_requests:
            return False
        return self.in_flight == 0 or self.reserved + tokens <= self.budget

    def adapt(self, load: Load, starved: bool) -> None:
        """Moves the budget by what the server says; `starved` means that requests wait on our side for it."""
        self.load = load
        enough_waiting = max(2, load.running // 10)
        if load.waiting > enough_waiting:
            self.budget = max(float(self.facts.context), min(self.budget, self.reserved) * 0.95)
        elif load.waiting == 0 and starved and load.token_usage < _FULL:
            # an answer under way holds half of its tokens on average, so more than the capacity can be promised
            self.budget = min(self.budget * 1.05, 2.0 * self.room)


class Fleet:
    """All servers. `share` of each server's room belongs to this actor; the others have the rest.

    Use: `await start()` inside the loop, then `await generate(...)` any number of times, then `await close()`.
    """

    def __init__(
        self,
        facts: Sequence[ServerFacts],
        open_session: Callable[[], aiohttp.ClientSession],
        material: ProbeMaterial,
        sampling: Sampling,
        *,
        max_in_flight: int,
        share: float,
        attempts: int,
        outage_limit_s: float,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self._say = say
        self._reference = facts[0]
        self.longest_prompt = min(fact.longest_prompt(sampling.max_new_tokens) for fact in facts)
        self._share = share
        self.endpoints = {fact.url: Endpoint(fact, *_room(fact, share)) for fact in facts}
        self._open_session = open_session
        self._material = material
        self._sampling = sampling
        self._max_in_flight = max_in_flight
        self._attempts = attempts
        self._outage_limit_s = outage_limit_s
        self._waiting: deque[tuple[int, str | None, asyncio.Future[Endpoint]]] = deque()
        self._healthy_since = time.monotonic()
        self._background: set[asyncio.Task[None]] = set()
        self.stopped: BaseException | None = None

    async def start(self) -> None:
        """Opens the session and begins to watch the servers."""
        self._session = self._open_session()
        for endpoint in self.endpoints.values():
            self._watch(endpoint, self._follow_load(endpoint))
        self._spawn(self._watch_outage())

    def follow(self, fit: Sequence[ServerFacts], out: Collection[str]) -> None:
        """Takes in the servers of `fit` that are new, and gives up those that are neither there nor in `out`.

        One that is given up costs the requests that it has; they are sent again to others.
        """
        for facts in fit:
            known = self.endpoints.get(facts.url)
            if known is None or known.withdrawn:
                endpoint = self.endpoints[facts.url] = Endpoint(facts, *_room(facts, self._share))
                self._watch(endpoint, self._follow_load(endpoint))
        offered = {facts.url for facts in fit}.union(out)
        for url, endpoint in self.endpoints.items():
            if url not in offered and not endpoint.withdrawn:
                endpoint.healthy, endpoint.withdrawn = False, True
                for task in [*endpoint.posts, *endpoint.watchers]:
                    task.cancel()
        self._admit_waiting()

    async def close(self) -> None:
        """Ends all that runs in the background."""
        for task in self._background:
            task.cancel()
        await self._session.close()

    def stop(self, reason: BaseException) -> None:
        """Makes every request that waits, and every later one, raise `reason`."""
        self.stopped = reason
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(reason)
        self._waiting.clear()

    @property
    def in_flight(self) -> int:
        return sum(endpoint.in_flight for endpoint in self.endpoints.values())

    async def generate(
        self, name: str, prompt_ids: Sequence[int], expected_tokens: int, near: str | None = None
    ) -> tuple[Answer, str, float, int]:
        """One checked answer, the server's URL, its latency in seconds and the number of attempts.

        `near` is the URL of a server that has read the beginning of this prompt: while it has room, it is asked again.

        Raises:
            RowFailed: all attempts failed.
            Refused: the server will never take it.
            Unauthorized, NoServer: nothing more will get through.
        """
        tokens = len(prompt_ids) + expected_tokens
        for attempt in range(1, self._attempts + 1):
            endpoint = await self._admit(tokens, near)
            try:
                started = time.monotonic()
                rid = f"{name}-{attempt}-{uuid.uuid4().hex[:8]}"
                body = request_body(rid, prompt_ids, self._sampling)
                answer = check(await self._post(endpoint, body), rid, prompt_ids, self._sampling)
                if answer.weight_version != endpoint.facts.weight_version:
                    raise Transient("other weights", f"weight_version is {answer.weight_version!r} now")
            except Transient as error:
                failure = error
                self._note_failure(endpoint, error)
            except Unauthorized as error:
                endpoint.healthy, endpoint.unfit = False, str(error)
                self._say(f"{endpoint.facts.url} stays out: {error}")
                if self._none_is_fit():
                    raise
                failure = Transient("unauthorized", str(error))
            else:
                endpoint.failures = 0
                endpoint.answers += 1
                endpoint.output_tokens += len(answer.output_ids)
                return answer, endpoint.facts.url, time.monotonic() - started, attempt
            finally:
                self._release(endpoint, tokens)
            if attempt < self._attempts:
                pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(pause, min(failure.retry_after_s, _LONGEST_BACKOFF_S)))
        raise RowFailed(f"{self._attempts} attempts failed, the last with {failure}") from failure

    async def _post(self, endpoint: Endpoint, body: dict[str, Any]) -> Any:
        """The reply to a request; Transient when the server is given up meanwhile."""
        task = asyncio.get_running_loop().create_task(post(self._session, f"{endpoint.facts.url}/generate", body))
        endpoint.posts.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise  # it is we who are cancelled
            if endpoint.withdrawn:
                raise Transient("withdrawn", "the server is gone") from None
            if endpoint.silent_looks < _SILENT_LOOKS:
                raise
            raise Transient("server hangs", "it holds its connections and answers nothing") from None
        finally:
            task.cancel()
            endpoint.posts.discard(task)

    async def _admit(self, tokens: int, near: str | None) -> Endpoint:
        if self.stopped is not None:
            raise self.stopped
        endpoint = None if self._waiting else self._choose(tokens, near)
        if endpoint is None:
            future: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
            self._waiting.append((tokens, near, future))
            try:
                return await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._release(future.result(), tokens)
                raise
        return self._reserve(endpoint, tokens)

    def _reserve(self, endpoint: Endpoint, tokens: int) -> Endpoint:
        endpoint.in_flight += 1
        endpoint.reserved += tokens
        return endpoint

    def _release(self, endpoint: Endpoint, tokens: int) -> None:
        endpoint.in_flight -= 1
        endpoint.reserved -= tokens
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Gives room to those who wait, in the order of their arrival."""
        while self._waiting:
            tokens, near, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            endpoint = self._choose(tokens, near)
            if endpoint is None:
                return
            self._waiting.popleft()
            future.set_result(self._reserve(endpoint, tokens))

    def _choose(self, tokens: int, near: str | None) -> Endpoint | None:
        """The server to ask now, if any has room: the one with the prompt's beginning, or else the roomiest."""
        if self.in_flight >= self._max_in_flight:
            return None
        having_room = {url: endpoint for url, endpoint in self.endpoints.items() if endpoint.has_room(tokens)}
        if near in having_room:
            return having_room[near]
        return min(having_room.values(), key=lambda e: (e.reserved + tokens) / e.budget, default=None)

    def _note_failure(self, endpoint: Endpoint, error: Transient) -> None:
        endpoint.retries[error.cause] += 1
        endpoint.failures += 1
        lost = error.cause in ("connection lost", "other weights", "server hangs")
        if endpoint.healthy and (endpoint.failures >= _FAILURES_UNTIL_DOWN or lost):
            self._say(f"{endpoint.facts.url} is taken out after {error}; it is probed until it is back")
            endpoint.healthy = False
            self._watch(endpoint, self._recover(endpoint))

    async def _recover(self, endpoint: Endpoint) -> None:
        """Probes a lost server until it is back; an unfit one stays out."""
        url, pause = endpoint.facts.url, 0.5
        while True:
            try:
                facts = await probe(self._session, url, self._material, self._sampling)
                if dict(facts.settings) != dict(self._reference.settings):
                    raise Unfit(f"it came back with other settings: {dict(facts.settings)}")
                if facts.longest_prompt(self._sampling.max_new_tokens) < self.longest_prompt:
                    raise Unfit(f"it came back with less room: a context of {facts.context} tokens")
                if not same_model(facts.prompt_logprobs, self._reference.prompt_logprobs):
                    raise Unfit("it came back with another model")
            except Transient:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 15.0)
            except Unfit as unfit:
                endpoint.unfit = str(unfit)
                self._say(f"{url} stays out: {unfit}")
                if self._none_is_fit():
                    self.stop(NoServer(f"No server is fit any more; {url}: {unfit}"))
                return
            else:
                self._say(f"{url} is back")
                endpoint.facts, endpoint.failures, endpoint.silent_looks, endpoint.healthy = facts, 0, 0, True
                endpoint.room, endpoint.most_requests, endpoint.budget = _room(facts, self._share)
                self._admit_waiting()
                return

    async def _follow_load(self, endpoint: Endpoint) -> None:
        while True:
            await asyncio.sleep(_FEEDBACK_S)
            if not endpoint.healthy:
                endpoint.load = Load()
                continue
            try:
                url = f"{endpoint.facts.url}/v1/loads?include=core,queues"
                ranks = (await get(self._session, url, _LOOK_TIMEOUT_S))["loads"]
                load = Load(
                    sum(rank["num_running_reqs"] for rank in ranks),
                    sum(rank["num_waiting_reqs"] for rank in ranks),
                    max((rank["token_usage"] for rank in ranks), default=0.0),
                    sum(rank["gen_throughput"] for rank in ranks),
                )
            except (Transient, Refused, Unauthorized, KeyError, TypeError) as error:
                silent = isinstance(error, Transient) and error.cause == "timeout"
                endpoint.silent_looks = endpoint.silent_looks + 1 if silent else 0
                if endpoint.silent_looks >= _SILENT_LOOKS:
                    for task in list(endpoint.posts):
                        task.cancel()
                continue
            endpoint.silent_looks = 0
            endpoint.adapt(load, starved=bool(self._waiting))
            self._admit_waiting()

    async def _watch_outage(self) -> None:
        said = False
        while True:
            await asyncio.sleep(1.0)
            if any(endpoint.healthy for endpoint in self.endpoints.values()):
                self._healthy_since, said = time.monotonic(), False
                continue
            down_s = time.monotonic() - self._healthy_since
            if down_s > self._outage_limit_s:
                offered = ", ".join(url for url, end in self.endpoints.items() if not end.withdrawn) or "all are gone"
                self.stop(
                    NoServer(
                        f"No server has answered for {down_s:.0f} s ({offered}). Start one and run "
                        "the same command again; what is finished is kept."
                    )
                )
                return
            if not said:
                self._say(f"No server answers; waiting up to {self._outage_limit_s:.0f} s.")
                said = True

    def _none_is_fit(self) -> bool:
        return all(endpoint.unfit or endpoint.withdrawn for endpoint in self.endpoints.values())

    def _watch(self, endpoint: Endpoint, work: Coroutine[Any, Any, None]) -> None:
        """Like _spawn, for as long as the server is ours."""
        task = self._spawn(work)
        endpoint.watchers.add(task)
        task.add_done_callback(endpoint.watchers.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.stop(error)

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(ended)
        return task


def _room(facts: ServerFacts, share: float) -> tuple[float, int, float]:
    """Our share of the tokens, the most requests (a tenth more than run at once), and the first budget."""
    room = facts.capacity_tokens * share
    return room, max(1, round(facts.max_running * share * 1.1)), room
