"""The fleet against stand-in servers: no wrong answer passes, lost servers cost little, load goes where room is."""

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from eagle3_ray.generator import AnswerLengths
from eagle3_ray.sglang import fleet as fleet_module
from eagle3_ray.sglang.fleet import Endpoint, Fleet, Load, NoServer, RowFailed
from eagle3_ray.sglang.probe import ServerFacts
from eagle3_ray.sglang.protocol import Answer, Refused, Transient, Unauthorized
from tests.fakes.sglang_server import FAULTS, FakeServer, token_logprobs
from tests.stand_in import EOS, prompts, right_answer, row_requests, server, started_fleet

HARMLESS = {"slow", "alter_text_only"}
NOT_IN_ONE_ANSWER = {"swapped_ids_only", "drop_token_consistent"}
"""Ids, counts, finish reason and log-probabilities of such an answer agree with each other and with the request. Only
the model itself can tell: its log-probabilities of the stored sequence are not the recorded ones (capture compares)."""
CAUSES = {
    "http_500": "HTTP 500",
    "http_503": "HTTP 503",
    "http_429": "HTTP 429",
    "abort_503": "HTTP 503",
    "reset": "connection lost",
    "reset_midway": "connection lost",
    "timeout": "timeout",
    "partial_json": "not JSON",
    "not_json": "not JSON",
    "abort": "abort",
    "other_weight_version": "other weights",
}
"""The causes under which retries are counted; every other fault is a "wrong answer"."""
Outcome = Answer | RowFailed
ROWS = 60


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_FIRST_BACKOFF_S", 0.002)
    monkeypatch.setattr(fleet_module, "_LONGEST_BACKOFF_S", 0.05)
    monkeypatch.setattr(fleet_module, "_FEEDBACK_S", 0.02)


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with server() as one:
        yield one


@pytest.fixture
def faulty(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.set(faults={}, strip_ids=[])


async def eventually(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def outcome(fleet: Fleet, name: str, prompt_ids: Sequence[int], expected: int = 12) -> Outcome:
    try:
        answer, _, _, _ = await fleet.generate(name, prompt_ids, expected)
        return answer
    except RowFailed as failed:
        return failed


async def outcomes(fleet: Fleet, rows: Sequence[Sequence[int]], expected: int = 12) -> list[Outcome]:
    return list(await asyncio.gather(*(outcome(fleet, f"row{n}", ids, expected) for n, ids in enumerate(rows))))


def output_ids(found: Sequence[Outcome]) -> list[list[int]]:
    assert all(isinstance(one, Answer) for one in found), "every row has an answer"
    return [one.output_ids for one in found if isinstance(one, Answer)]


def retries(fleet: Fleet) -> Counter[str]:
    return sum((endpoint.retries for endpoint in fleet.endpoints.values()), Counter())


def in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


# ---- no wrong answer gets through


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in NOT_IN_ONE_ANSWER])
def test_three_in_ten_requests_go_wrong_and_every_row_is_right_in_the_end(faulty: FakeServer, fault: str) -> None:
    rows = prompts(ROWS)
    seen_before = len(row_requests(faulty))
    # a hanging request costs its whole timeout, so the first attempts hang and no later one
    when: float | list[int] = list(range(0, ROWS, 3)) if fault == "timeout" else 0.3
    faulty.set(faults={fault: when}, strip_ids=[EOS], slow_s=0.02)

    async def run() -> tuple[list[Outcome], Counter[str]]:
        async with started_fleet(faulty, timeout_s=1.5 if fault == "timeout" else 10) as fleet:
            return await outcomes(fleet, rows), retries(fleet)

    found, counted = asyncio.run(run())
    assert output_ids(found) == [right_answer(ids) for ids in rows]

    seen = row_requests(faulty)[seen_before:]
    hit = sum(request["outcome"] == f"fault:{fault}" for request in seen)
    assert hit >= 10
    if fault in HARMLESS:
        assert counted.total() == 0
    elif fault == "strip_token":  # an answer that was cut off has no stop token to strip
        assert counted == {"wrong answer": len(seen) - len(rows)}
    elif fault == "timeout":  # on a machine that is very busy, others are late too, some before the server sees them
        assert set(counted) == {"timeout"}
        assert counted.total() >= len(seen) - len(rows) >= hit
    else:
        assert counted == {CAUSES.get(fault, "wrong answer"): hit}
        assert len(seen) == len(rows) + hit
    assert len({request["rid"] for request in seen}) == len(seen), "each attempt has a request id of its own"


@pytest.mark.parametrize("fault", sorted(NOT_IN_ONE_ANSWER))
def test_what_no_single_answer_shows_is_what_the_models_own_log_probabilities_show(
    faulty: FakeServer, fault: str
) -> None:
    rows = prompts(ROWS)
    faulty.set(faults={fault: 0.3})

    async def run() -> list[Outcome]:
        async with started_fleet(faulty) as fleet:
            return await outcomes(fleet, rows)

    wrong = 0
    for ids, found in zip(rows, asyncio.run(run()), strict=True):
        assert isinstance(found, Answer)
        assert found.output_logprobs is not None
        scored = token_logprobs([*ids, *found.output_ids], len(ids), model_seed=0)
        assert (scored == found.output_logprobs) == (found.output_ids == right_answer(ids))
        wrong += found.output_ids != right_answer(ids)
    assert wrong > 5, "check() cannot see this fault; if it can now, move it to the detectable ones"


def test_a_row_fails_after_its_attempts_and_leaves_no_reservation(faulty: FakeServer) -> None:
    faulty.set(faults={"http_503": 1.0})

    async def run() -> tuple[list[Outcome], Counter[str], int, int]:
        async with started_fleet(faulty, attempts=3) as fleet:
            found = await outcomes(fleet, prompts(4))
            [endpoint] = fleet.endpoints.values()
            return found, retries(fleet), endpoint.in_flight, endpoint.reserved

    found, counted, in_flight, reserved = asyncio.run(run())
    assert [str(one) for one in found] == ["3 attempts failed, the last with HTTP 503"] * 4
    assert (counted, in_flight, reserved) == ({"HTTP 503": 12}, 0, 0)


def test_a_400_is_refused_and_never_repeated(shared: FakeServer) -> None:
    seen_before = len(row_requests(shared))

    async def run() -> None:
        async with started_fleet(shared) as fleet:
            with pytest.raises(Refused, match="is longer than the model's context length"):
                await fleet.generate("too-long", prompts(1, 9000)[0], 12)
            assert retries(fleet).total() == 0
            assert output_ids(await outcomes(fleet, prompts(2))) == [right_answer(ids) for ids in prompts(2)]

    asyncio.run(run())
    assert [r["outcome"] for r in row_requests(shared)[seen_before:]] == ["refused: 400", "answered", "answered"]


def test_a_key_that_is_no_longer_good_stops_the_run() -> None:
    async def run() -> None:
        with server(api_key="old") as one:
            async with started_fleet(one, api_key="old") as fleet:
                one.set(api_key="new")
                with pytest.raises(Unauthorized, match="HTTP 401"):
                    await fleet.generate("row", prompts(1)[0], 12)
                assert "HTTP 401" in str(fleet.endpoints[one.url].unfit)

    asyncio.run(run())


def test_one_server_that_lets_nobody_in_any_more_leaves_the_work_to_the_others() -> None:
    async def run() -> None:
        with server(api_key="old") as one, server(api_key="old") as other:
            async with started_fleet(one, other, api_key="old") as fleet:
                one.set(api_key="new")
                found = await outcomes(fleet, prompts(40))
                assert output_ids(found) == [right_answer(ids) for ids in prompts(40)]
                assert fleet.endpoints[other.url].answers == 40

    asyncio.run(run())


# ---- servers that go and come


def test_killing_one_of_two_servers_repeats_at_most_what_was_in_flight_there() -> None:
    rows = prompts(200)

    async def run(alive: FakeServer, doomed: FakeServer) -> tuple[list[Outcome], int]:
        async with started_fleet(alive, doomed) as fleet:
            job = in_background(outcomes(fleet, rows))
            end = fleet.endpoints[doomed.url]
            await eventually(lambda: end.answers >= 30 and end.in_flight >= 10)
            lost = end.in_flight
            doomed.kill()
            return await job, lost

    with server(token_latency_s=0.002) as alive, server(token_latency_s=0.002) as doomed:
        found, lost = asyncio.run(run(alive, doomed))
        assert output_ids(found) == [right_answer(ids) for ids in rows]
        assert 0 < len(row_requests(alive, doomed)) - len(rows) <= lost


def test_a_restarted_server_is_probed_and_used_again() -> None:
    rows = prompts(120)

    async def run(one: FakeServer) -> tuple[list[Outcome], int]:
        async with started_fleet(one) as fleet:
            job = in_background(outcomes(fleet, rows))
            [end] = fleet.endpoints.values()
            await eventually(lambda: end.answers >= 20 and end.in_flight > 0)
            lost = end.in_flight
            one.kill()
            await eventually(lambda: not end.healthy and end.in_flight == 0)
            one.start()
            found = await job
            return found, lost

    with server(token_latency_s=0.002) as one:
        found, lost = asyncio.run(run(one))
        assert output_ids(found) == [right_answer(ids) for ids in rows]
        seen = one.requests()
        restarted = [request for request in seen if request["boot"] == seen[-1]["boot"]]
        assert len(restarted) < len(seen)
        assert restarted[0]["rid"].startswith("probe"), "the probe comes before the first row"
        assert len(row_requests(one)) - len(rows) <= lost


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_version": "v2"}, "came back with other settings.*v2"),
        ({"model_seed": 5}, "came back with another model"),
        ({"context_length": 64}, "came back with less room: a context of 64 tokens"),
        ({"faults": {"strip_token": 1.0}, "strip_ids": [EOS], "faults_hit_probe": True}, "token 2 was forced"),
    ],
)
def test_a_server_that_comes_back_as_another_stays_out(changes: dict[str, Any], words: str) -> None:
    rows = prompts(60)

    async def run(good: FakeServer, other: FakeServer) -> None:
        async with started_fleet(good, other) as fleet:
            end = fleet.endpoints[other.url]
            other.kill()
            other.options.__dict__.update(changes)
            other.start()
            served_before = len(row_requests(other))
            # a request over a connection of the first server's process, or a new one, is answered by the other
            end.failures = 2
            fleet._note_failure(end, Transient("connection lost", "test"))
            await eventually(lambda: end.unfit is not None)
            assert output_ids(await outcomes(fleet, rows)) == [right_answer(ids) for ids in rows]
            assert len(row_requests(other)) == served_before
            assert not end.healthy
            assert fleet.stopped is None
            assert re.search(words, end.unfit or ""), end.unfit

    with server() as good, server() as other:
        asyncio.run(run(good, other))


@pytest.mark.parametrize("full", [False, True])
def test_the_server_that_has_read_the_beginning_is_asked_again_while_it_has_room(full: bool) -> None:
    async def run(one: FakeServer, other: FakeServer) -> None:
        async with started_fleet(one, other) as fleet:
            near, elsewhere = fleet.endpoints[one.url], fleet.endpoints[other.url]
            near.reserved, near.in_flight = round(near.budget * (1.0 if full else 0.5)), 1  # the other one is idle
            work = (fleet.generate(f"row{n}", ids, 12, near=one.url) for n, ids in enumerate(prompts(20)))
            urls = {url for _, url, _, _ in await asyncio.gather(*work)}
            assert urls == {elsewhere.facts.url if full else near.facts.url}

    with server() as one, server() as other:
        asyncio.run(run(one, other))


def test_new_weights_under_a_running_job_are_never_stored_and_end_it() -> None:
    async def run(one: FakeServer) -> None:
        async with started_fleet(one) as fleet:
            one.set(weight_version="v2")
            with pytest.raises(NoServer, match=r"No server is fit any more.*other settings"):
                await fleet.generate("row", prompts(1)[0], 12)

    with server() as one:
        asyncio.run(run(one))


def test_when_all_are_down_everybody_who_waits_is_told_after_the_limit() -> None:
    async def run(one: FakeServer) -> None:
        async with started_fleet(one, outage_limit_s=0.3) as fleet:
            one.kill()
            work = (fleet.generate(f"row{n}", ids, 12) for n, ids in enumerate(prompts(20)))
            found = await asyncio.gather(*work, return_exceptions=True)
            assert all(isinstance(error, NoServer) for error in found)
            assert "No server has answered for" in str(found[0])
            assert one.url in str(found[0])
            with pytest.raises(NoServer):
                await fleet.generate("late", prompts(1)[0], 12)

    with server() as one:
        asyncio.run(run(one))


def test_a_server_that_joins_is_used_with_its_own_room() -> None:
    async def run(early: FakeServer, late: FakeServer) -> None:
        async with started_fleet(early, max_in_flight=500) as fleet:
            tasks = [in_background(outcome(fleet, f"r{n}", ids)) for n, ids in enumerate(prompts(300))]
            await eventually(lambda: fleet.endpoints[early.url].answers > 20)
            early_facts = fleet.endpoints[early.url].facts
            fleet.follow([early_facts], out=[late.url])
            assert list(fleet.endpoints) == [early.url]
            facts = replace(early_facts, url=late.url, capacity_tokens=5000, max_running=4)
            fleet.follow([early_facts, facts], out=[])
            end = fleet.endpoints[late.url]
            assert (end.most_requests, end.budget, end.in_flight) == (4, 5000, 4)
            assert output_ids(await asyncio.gather(*tasks)) == [right_answer(ids) for ids in prompts(300)]
            assert 0 < end.answers < fleet.endpoints[early.url].answers
            assert late.max_in_flight() == 4

    with (
        server(max_total_tokens=20000, max_running=8, base_latency_s=0.01) as early,
        server(max_running=4, max_total_tokens=5000, base_latency_s=0.01) as late,
    ):
        asyncio.run(run(early, late))


def test_a_server_that_is_withdrawn_loses_what_is_in_flight_there_and_nothing_else() -> None:
    async def run(stays: FakeServer, goes: FakeServer) -> None:
        async with started_fleet(stays, goes) as fleet:
            end, gone = fleet.endpoints[stays.url], fleet.endpoints[goes.url]
            goes.set(faults={"timeout": 1.0})  # as behind a dead network: nothing comes back, no connection ends
            tasks = [in_background(outcome(fleet, f"r{n}", ids)) for n, ids in enumerate(prompts(ROWS))]
            await eventually(lambda: gone.in_flight > 0 and end.answers > 10)
            in_flight, answered = gone.in_flight, gone.answers
            fleet.follow([end.facts], out=[])
            assert output_ids(await asyncio.gather(*tasks)) == [right_answer(ids) for ids in prompts(ROWS)]
            assert retries(fleet) == {"withdrawn": in_flight}
            assert (gone.answers, gone.in_flight, gone.watchers, gone.posts) == (answered, 0, set(), set())
            assert not gone.healthy

    with server(base_latency_s=0.01) as stays, server(base_latency_s=0.01) as goes:
        asyncio.run(run(stays, goes))


def test_a_fleet_whose_servers_were_all_withdrawn_waits_for_new_ones() -> None:
    async def run(old: FakeServer, new: FakeServer) -> None:
        async with started_fleet(old) as fleet:
            facts = fleet.endpoints[old.url].facts
            fleet.follow([], out=[])
            task = in_background(outcome(fleet, "row", prompts(1)[0]))
            await eventually(lambda: len(fleet._waiting) == 1)
            fleet.follow([replace(facts, url=new.url)], out=[])
            assert output_ids([await task]) == [right_answer(prompts(1)[0])]
            fleet.follow([facts], out=[])  # the first one again
            assert output_ids([await outcome(fleet, "row", prompts(1)[0])]) == [right_answer(prompts(1)[0])]

    with server() as old, server() as new:
        asyncio.run(run(old, new))


# ---- admission


def test_requests_in_flight_fill_the_token_budget_and_never_exceed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_FEEDBACK_S", 60)

    async def run(one: FakeServer) -> None:
        async with started_fleet(one) as fleet:
            await outcomes(fleet, prompts(80, length=10), expected=90)

    with server(max_total_tokens=2000, base_latency_s=0.02) as one:
        asyncio.run(run(one))
        assert one.max_in_flight() == 20


def test_the_budget_grows_where_nothing_waits_at_the_server() -> None:
    async def run(one: FakeServer) -> Endpoint:
        async with started_fleet(one) as fleet:
            await outcomes(fleet, prompts(100), expected=400)
            return fleet.endpoints[one.url]

    with server(max_total_tokens=2000, base_latency_s=0.03) as one:
        end = asyncio.run(run(one))
        assert 2000 < end.budget <= 2 * 2000
        assert one.max_in_flight() > 2000 // 406


def test_the_budget_shrinks_where_much_waits_at_the_server() -> None:
    async def run(one: FakeServer) -> Endpoint:
        async with started_fleet(one, max_in_flight=500) as fleet:
            found = await outcomes(fleet, prompts(400), expected=1)
            assert output_ids(found) == [right_answer(ids) for ids in prompts(400)]
            return fleet.endpoints[one.url]

    with server(max_total_tokens=700, context_length=100, base_latency_s=0.05) as one:
        end = asyncio.run(run(one))
        assert 90 <= one.max_in_flight() <= 100, "each was thought to need 7 tokens"
        assert 100 <= end.budget < 0.8 * 700


def facts_of(**changes: Any) -> ServerFacts:
    plain: dict[str, Any] = {
        "url": "http://one",
        "weight_version": "v1",
        "capacity_tokens": 1000,
        "max_running": 32,
        "longest_input": 500,
        "context": 200,
        "settings": {},
        "prompt_logprobs": (),
        "greedy_ids": (),
    }
    return ServerFacts(**(plain | changes))


@pytest.mark.parametrize(
    ("load", "starved", "reserved", "budget"),
    [
        (Load(running=30, waiting=0), True, 1000, 1050),
        (Load(running=30, waiting=0), False, 1000, 1000),  # nobody would use more
        (Load(running=30, waiting=0, token_usage=0.95), True, 1000, 1000),  # its KV cache is as good as full
        (Load(running=30, waiting=2), True, 1000, 1000),  # just enough waits to keep it busy
        (Load(running=100, waiting=10), True, 1000, 1000),
        (Load(running=30, waiting=4), True, 1000, 950),
        (Load(running=30, waiting=4), True, 600, 570),  # from what is used, not from what is allowed
        (Load(running=1, waiting=9), True, 50, 200),  # one request of full length always fits
    ],
)
def test_a_budget_follows_what_the_server_says(load: Load, starved: bool, reserved: int, budget: float) -> None:
    end = Endpoint(facts_of(), room=1000, budget=1000, most_requests=35, reserved=reserved)
    end.adapt(load, starved)
    assert end.budget == pytest.approx(budget)


def test_a_budget_grows_to_twice_the_capacity_at_most() -> None:
    end = Endpoint(facts_of(), room=1000, budget=1000, most_requests=35)
    for _ in range(50):
        end.adapt(Load(running=30), starved=True)
    assert end.budget == 2000


def test_uneven_servers_get_load_by_their_room() -> None:
    async def run(*servers: FakeServer) -> list[int]:
        async with started_fleet(*servers, max_in_flight=500) as fleet:
            await outcomes(fleet, prompts(400))
            return [fleet.endpoints[one.url].answers for one in servers]

    with server(max_running=8, base_latency_s=0.05) as small, server(max_running=32, base_latency_s=0.05) as large:
        few, many = asyncio.run(run(small, large))
        assert few + many == 400
        assert 2.5 < many / few < 6
        assert small.max_in_flight() == 9
        assert large.max_in_flight() == 35


def test_max_in_flight_is_an_upper_bound(shared: FakeServer) -> None:
    async def run(one: FakeServer) -> None:
        async with started_fleet(one, max_in_flight=5) as fleet:
            await outcomes(fleet, prompts(60))

    with server(base_latency_s=0.005) as one:
        asyncio.run(run(one))
        assert one.max_in_flight() == 5


def test_a_big_request_is_not_overtaken_by_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[int] = []
    reserve = Fleet._reserve

    def recording(self: Fleet, endpoint: Endpoint, tokens: int) -> Endpoint:
        admitted.append(tokens)
        assert endpoint.in_flight == 0 or endpoint.reserved + tokens <= endpoint.budget
        return reserve(self, endpoint, tokens)

    monkeypatch.setattr(Fleet, "_reserve", recording)
    sizes = [40, 60, 50] * 20
    sizes[20], sizes[40] = 900, 3000  # most of the budget, and more than all of it

    async def run(one: FakeServer) -> list[Outcome]:
        async with started_fleet(one) as fleet:
            rows = zip(prompts(60, length=10), sizes, strict=True)
            return list(
                await asyncio.gather(*(outcome(fleet, f"r{n}", ids, s - 10) for n, (ids, s) in enumerate(rows)))
            )

    monkeypatch.setattr(fleet_module, "_FEEDBACK_S", 60)
    with server(max_total_tokens=1000, context_length=500, base_latency_s=0.005) as one:
        assert all(isinstance(found, Answer) for found in asyncio.run(run(one)))
    assert admitted == sizes


def test_requests_that_are_cancelled_give_their_room_back() -> None:
    async def run(one: FakeServer) -> None:
        async with started_fleet(one, max_in_flight=8) as fleet:
            tasks = [in_background(outcome(fleet, f"r{n}", ids)) for n, ids in enumerate(prompts(60))]
            [end] = fleet.endpoints.values()
            await eventually(lambda: end.answers >= 8 and end.in_flight == 8)
            for task in tasks[::2]:
                task.cancel()
            found = await asyncio.gather(*tasks[1::2])
            assert output_ids(found) == [right_answer(ids) for ids in prompts(60)[1::2]]
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (end.in_flight, end.reserved, len(fleet._waiting)) == (0, 0, 0)

    with server(base_latency_s=0.01) as one:
        asyncio.run(run(one))


def test_an_actor_with_a_share_of_a_server_leaves_the_others_their_room() -> None:
    async def run(one: FakeServer) -> None:
        async with started_fleet(one, share=0.25, max_in_flight=500) as fleet:
            [end] = fleet.endpoints.values()
            assert (end.budget, end.most_requests) == (2000, 11)
            await outcomes(fleet, prompts(60))

    with server(max_running=40, max_total_tokens=8000, base_latency_s=0.01) as one:
        asyncio.run(run(one))
        assert one.max_in_flight() == 11


# ---- answer lengths


def test_expected_lengths_start_in_the_middle_and_follow_each_partition() -> None:
    lengths = AnswerLengths(max_new_tokens=1000)
    assert lengths.expected("code") == 501
    for _ in range(400):
        lengths.learn("code", 40)
        lengths.learn("essays", 990)
    assert 40 <= lengths.expected("code") <= 45
    assert 980 <= lengths.expected("essays") <= 1000
    assert lengths.expected("unseen") == 501


def test_an_expected_length_is_never_over_the_limit_nor_under_one() -> None:
    for most in (1, 2, 7):
        lengths = AnswerLengths(most)
        assert 1 <= lengths.expected("p") <= most
        for _ in range(100):
            lengths.learn("p", most)
        assert lengths.expected("p") == most


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay open and nothing comes back: no request timeout of half an hour has to pass."""
    monkeypatch.setattr(fleet_module, "_SILENT_LOOKS", 1)
    monkeypatch.setattr(fleet_module, "_LOOK_TIMEOUT_S", 0.2)

    async def run(hanging: FakeServer, healthy: FakeServer) -> None:
        async with started_fleet(hanging, healthy) as fleet:
            work = in_background(outcomes(fleet, prompts(60)))
            while fleet.endpoints[hanging.url].in_flight == 0:
                await asyncio.sleep(0.01)
            os.kill(hanging.pid, signal.SIGSTOP)
            try:
                answers = await asyncio.wait_for(work, 30)
            finally:
                os.kill(hanging.pid, signal.SIGCONT)
            assert output_ids(answers) == [right_answer(ids) for ids in prompts(60)]
            assert fleet.endpoints[hanging.url].retries["server hangs"] > 0

    with server(base_latency_s=0.3, max_running=4) as hanging, server(base_latency_s=0.05) as healthy:
        asyncio.run(run(hanging, healthy))
