"""The servers of a run, known to all of its actors: one named Ray actor that probes whatever it is offered.

The driver offers URLs again and again, and generating actors ask for the roster again and again. So the actor may die:
Ray starts it anew, it says nothing until the driver has spoken, and meanwhile everybody goes on with what they know.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, compare, probe
from eagle3_ray.sglang.protocol import Sampling, Transient
from eagle3_ray.sglang.transport import open_session

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


@dataclass(frozen=True)
class Roster:
    """The servers that are offered: those that are fit, and by URL why another one gets no requests."""

    fit: list[ServerFacts]
    out: dict[str, str]


class Registry:
    """The actor. `facts` are of the servers that were probed before the first row; later ones have to be their like."""

    def __init__(
        self,
        facts: Sequence[ServerFacts],
        material: ProbeMaterial,
        sampling: Sampling,
        api_key: str | None,
        timeout_s: float,
        telemetry: Any,
    ) -> None:
        self._reference = facts[0]
        self._longest_prompt = min(fact.longest_prompt(sampling.max_new_tokens) for fact in facts)
        self._fit = {fact.url: fact for fact in facts}
        self._out: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._offered: list[str] | None = None
        self._material = material
        self._sampling = sampling
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._telemetry = telemetry

    async def offer(self, urls: list[str]) -> None:
        """All servers that there are now; new ones are probed, those that are missing are forgotten."""
        for url in set(self._offered or []) - set(urls):
            if probing := self._probes.pop(url, None):
                probing.cancel()
            self._out.pop(url, None)
            if self._fit.pop(url, None):
                self._telemetry.say.remote(f"{url} is gone")
        self._offered = list(urls)
        for url in urls:
            if url not in self._fit and url not in self._probes:
                self._out[url] = "it is being probed"
                self._probes[url] = asyncio.get_running_loop().create_task(self._probe(url))

    async def roster(self) -> Roster | None:
        """None where nobody has offered anything yet, which says nothing of the servers."""
        if self._offered is None:
            return None
        return Roster([self._fit[url] for url in self._offered if url in self._fit], dict(self._out))

    async def _probe(self, url: str) -> None:
        """Probes a server until it is fit, unfit, or offered no longer."""
        pause = _FIRST_PAUSE_S
        async with open_session(self._api_key, self._timeout_s) as session:
            while True:
                try:
                    facts = await probe(session, url, self._material, self._sampling)
                    warnings = compare([self._reference, facts])
                    self._check_room(facts)
                except Transient as silent:
                    self._out[url] = f"it does not answer: {silent}"
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, _LONGEST_PAUSE_S)
                except Unfit as unfit:
                    self._out[url] = str(unfit)
                    self._telemetry.say.remote(f"{url} stays out: {unfit}")
                    return
                else:
                    self._fit[url] = facts
                    del self._out[url]
                    for event in ("is fit and takes requests", *facts.warnings, *warnings):
                        self._telemetry.say.remote(f"{url}: {event}")
                    return

    def _check_room(self, facts: ServerFacts) -> None:
        """A prompt that was let in for the other servers must not be refused by a new one."""
        longest = facts.longest_prompt(self._sampling.max_new_tokens)
        if longest < self._longest_prompt:
            raise Unfit(
                f"it takes prompts of {longest} tokens, the servers of this run {self._longest_prompt}. Start it with "
                "their --context-length and --mem-fraction-static."
            )
