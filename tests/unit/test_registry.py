"""The list of servers that all actors of a run share, against stand-in servers and without Ray."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from eagle3_ray import registry as registry_module
from eagle3_ray.registry import Registry, Roster
from eagle3_ray.sglang.probe import ServerFacts, probe
from eagle3_ray.sglang.transport import open_session
from tests.fakes.sglang_server import FakeServer
from tests.stand_in import MATERIAL, SAMPLING, server


class Heard:
    """Takes what is said to the telemetry actor."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.say = self

    def remote(self, event: str) -> None:
        self.events.append(event)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_FIRST_PAUSE_S", 0.02)


async def opened(first: FakeServer) -> tuple[Registry, ServerFacts, Heard]:
    """A registry whose job began with `first`."""
    async with open_session(None, 10) as session:
        facts = await probe(session, first.url, MATERIAL, SAMPLING)
    heard = Heard()
    return Registry([facts], MATERIAL, SAMPLING, None, 10, heard), facts, heard


async def roster_with(registry: Registry, condition: Callable[[Roster], bool]) -> Roster:
    deadline = asyncio.get_running_loop().time() + 10
    while True:
        roster = await registry.roster()
        assert roster is not None
        if condition(roster):
            return roster
        assert asyncio.get_running_loop().time() < deadline, roster
        await asyncio.sleep(0.01)


def test_a_registry_that_was_just_started_says_nothing() -> None:
    async def run(one: FakeServer) -> None:
        registry, facts, _ = await opened(one)
        assert await registry.roster() is None
        await registry.offer([one.url])
        assert await registry.roster() == Roster([facts], {})

    with server() as one:
        asyncio.run(run(one))


def test_a_server_that_is_offered_is_out_until_its_probe_has_passed() -> None:
    async def run(one: FakeServer, late: FakeServer) -> None:
        registry, facts, heard = await opened(one)
        late.kill()
        await registry.offer([one.url, late.url])
        roster = await roster_with(registry, lambda roster: "does not answer" in roster.out.get(late.url, ""))
        assert roster.fit == [facts]
        assert heard.events == []
        late.start()
        roster = await roster_with(registry, lambda roster: not roster.out)
        assert [fit.url for fit in roster.fit] == [one.url, late.url]
        assert roster.fit[1].capacity_tokens == 5000
        await registry.offer([late.url])
        assert (await roster_with(registry, lambda _: True)).fit == roster.fit[1:]
        assert heard.events == [f"{late.url}: is fit and takes requests", f"{one.url} is gone"]

    with server(max_total_tokens=5000, context_length=400) as one, server(**one.options.__dict__) as late:
        asyncio.run(run(one, late))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_seed": 4}, "do not serve the same model"),
        ({"weight_version": "v2"}, "weight_version"),
        ({"model_path": "fake/other"}, "serves 'fake/other'"),
        ({"context_length": 300}, "it takes prompts of 274 tokens, the servers of this run 374"),
    ],
)
def test_a_server_unlike_the_first_stays_out_and_the_reason_is_told_once(changes: dict[str, Any], words: str) -> None:
    async def run(one: FakeServer, other: FakeServer) -> None:
        registry, facts, heard = await opened(one)
        for _ in range(3):
            await registry.offer([one.url, other.url])
        roster = await roster_with(registry, lambda roster: "being probed" not in roster.out[other.url])
        assert roster.fit == [facts]
        assert words in roster.out[other.url]
        assert [event.startswith(f"{other.url} stays out: ") for event in heard.events] == [True]
        await registry.offer([one.url])
        assert await registry.roster() == Roster([facts], {})

    with server(context_length=400) as one, server(**({"context_length": 400} | changes)) as other:
        asyncio.run(run(one, other))


def test_a_server_that_is_offered_no_longer_is_not_probed_on() -> None:
    async def run(one: FakeServer, silent: FakeServer) -> None:
        registry, _, _ = await opened(one)
        silent.kill()
        await registry.offer([one.url, silent.url])
        await roster_with(registry, lambda roster: "does not answer" in roster.out[silent.url])
        assert len(asyncio.all_tasks()) == 2
        await registry.offer([one.url])
        assert (await roster_with(registry, lambda _: len(asyncio.all_tasks()) == 1)).out == {}

    with server() as one, server() as silent:
        asyncio.run(run(one, silent))
