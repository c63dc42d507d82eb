"""What a server answers becomes acceptance counts, or an error that says why it cannot."""

from collections.abc import Iterator
from typing import Any

import pytest

from eagle3_ray.acceptance import engine
from eagle3_ray.acceptance.engine import EngineFailed, Served, engine_info, measure, read_answer
from eagle3_ray.acceptance.lossless import Mismatch, compare, first_difference
from eagle3_ray.acceptance.questions import EvalPrompt
from eagle3_ray.acceptance.tally import Acceptance
from eagle3_ray.sglang.protocol import Sampling, WrongAnswer
from tests.fakes.sglang_server import FakeServer

SAMPLING = Sampling(12, 0.0, 1.0, False, 49152, frozenset([2]))
PROMPT = EvalPrompt("set", "", "a", 0, (5, 6, 7))
PROMPTS = [EvalPrompt("set", "", str(n), 0, (5, 6, 7 + n)) for n in range(6)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(mean_tokens=1000) as fake:
        yield fake


def body(tokens: int, **meta: Any) -> dict[str, Any]:
    """An answer cut at 12 tokens, as sglang 0.5.23 gives it."""
    return {
        "output_ids": [9] * tokens,
        "prompt_token_ids": [5, 6, 7],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": 3,
            "completion_tokens": tokens,
            "weight_version": "default",
            "num_retractions": 0,
            **meta,
        },
    }


def test_the_counts_are_those_of_meta_info_less_the_prefills_token() -> None:
    answer = body(12, spec_verify_ct=5, spec_correct_drafts_histogram=[1, 2, 2], spec_accept_length=2.4)
    assert read_answer(answer, "r", PROMPT, SAMPLING).acceptance == Acceptance(1, 11, 5, (1, 2, 2))


def test_a_retracted_request_was_prefilled_twice() -> None:
    answer = body(12, spec_verify_ct=5, spec_correct_drafts_histogram=[1, 3, 1], num_retractions=1)
    assert read_answer(answer, "r", PROMPT, SAMPLING).acceptance == Acceptance(1, 10, 5, (1, 3, 1))


def test_an_answer_of_a_plain_server_has_no_counts() -> None:
    assert read_answer(body(12), "r", PROMPT, SAMPLING).acceptance is None


def test_counts_that_contradict_the_answer_are_a_wrong_answer() -> None:
    with pytest.raises(WrongAnswer, match="cannot have yielded 11 tokens"):
        read_answer(body(12, spec_verify_ct=5, spec_correct_drafts_histogram=[3, 2]), "r", PROMPT, SAMPLING)
    with pytest.raises(WrongAnswer, match="no 'spec_correct_drafts_histogram'"):
        read_answer(body(12, spec_verify_ct=5), "r", PROMPT, SAMPLING)


def test_counts_that_are_no_numbers_are_a_wrong_answer() -> None:
    with pytest.raises(WrongAnswer, match="num_retractions is 'x', no whole number"):
        read_answer(body(12, num_retractions="x"), "r", PROMPT, SAMPLING)
    with pytest.raises(WrongAnswer, match="counters contradict the answer"):
        read_answer(body(12, spec_verify_ct=5, spec_correct_drafts_histogram=[float("inf")]), "r", PROMPT, SAMPLING)


def test_the_checks_of_any_answer_hold_for_drafted_ones_too() -> None:
    with pytest.raises(WrongAnswer, match="finish reason length after 11 of 12 tokens"):
        read_answer(body(11, spec_verify_ct=5, spec_correct_drafts_histogram=[0, 5]), "r", PROMPT, SAMPLING)


def test_all_prompts_are_answered_in_order_and_never_more_at_once_than_asked(server: FakeServer) -> None:
    server.set(token_latency_s=0.005)
    measured = measure(server.url, PROMPTS, SAMPLING, concurrency=2)
    server.set(token_latency_s=0.0)
    assert [one.prompt for one in measured.served] == PROMPTS
    assert server.max_in_flight() == 2
    assert measured.output_tokens == 6 * 12
    assert measured.tokens_per_second == pytest.approx(72 / measured.wall_s)


def test_a_long_measurement_says_how_far_it_is(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "_SAY_EVERY_S", 0.02)
    server.set(base_latency_s=0.1)
    measure(server.url, PROMPTS[:2], SAMPLING, 1)
    server.set(base_latency_s=0.0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "  0/2 answers, 0 tokens/s"
    assert any(line.startswith("  1/2 answers, ") for line in said)


def test_a_lost_connection_is_tried_again_and_a_broken_server_is_an_error(server: FakeServer) -> None:
    server.set(faults={"reset": [0, 1]})
    assert len(measure(server.url, PROMPTS[:1], SAMPLING, 1).served) == 1
    server.set(faults={"wrong_count": 1.0})
    with pytest.raises(EngineFailed, match=r"failed 4 times on set/0: .*completion_tokens is 13"):
        measure(server.url, PROMPTS[:1], SAMPLING, 1)
    server.set(faults={})


def test_a_prompt_that_the_server_refuses_is_named(server: FakeServer) -> None:
    long = EvalPrompt("set", "", "long", 0, (7,) * 9000)
    with pytest.raises(EngineFailed, match=r"refuses set/long \(9000 tokens\)"):
        measure(server.url, [long], SAMPLING, 1)


def test_the_server_says_how_it_speculates(server: FakeServer) -> None:
    fields = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/d",
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 6,
    }
    with pytest.raises(EngineFailed, match="has no 'speculative_draft_model_path'"):
        engine_info(server.url)
    server.set(server_info=fields)
    info = engine_info(server.url)
    assert (info.algorithm, info.draft_model, info.steps, info.topk) == ("EAGLE3", "/d", 5, 1)
    assert (info.model, info.version) == ("fake/model", "0.5.23")
    with pytest.raises(EngineFailed, match="does not answer /server_info"):
        engine_info("http://127.0.0.1:9")


def test_the_first_difference_counts_an_end_that_comes_early() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def served(ids: tuple[int, ...], prompt: EvalPrompt = PROMPT) -> Served:
    return Served(prompt, ids, "length", None)


def test_a_mismatch_is_told_with_its_place_and_the_targets_own_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gap(url: str, prefix: list[int], a: int, b: int, api_key: str | None) -> float:
        asked.append((url, prefix, a, b))
        return 0.01 if a == 2 else 1.5

    monkeypatch.setattr("eagle3_ray.acceptance.lossless.token_gap", gap)
    plain = [served((1, 2)), served((1, 3)), served((1,)), served((4,))]
    result = compare(plain, [served((1, 8)), served((1, 9)), served((1, 7)), served((4,))], "http://x")
    assert result.mismatches == (
        Mismatch("set/a", 1, 2, 8, 0.01),
        Mismatch("set/a", 1, 3, 9, 1.5),
        Mismatch("set/a", 1, None, 7, None),
    )
    assert asked == [("http://x", [5, 6, 7, 1], 2, 8), ("http://x", [5, 6, 7, 1], 3, 9)]
    assert (result.answers, result.equal) == (4, 1)
    assert [mismatch.plain for mismatch in result.unexplained] == [3, None]
    assert [one["near_tie"] for one in result.as_json()["mismatches"]] == [True, False, False]


def test_answers_to_different_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="set/a and set/0 are answers to different prompts"):
        compare([served((1,))], [served((1,), PROMPTS[0])], "http://x")
