"""What `check` lets through, and that each contradiction in an answer is refused in words that name it."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from eagle3_ray.sglang.protocol import Answer, Sampling, Transient, Unauthorized, WrongAnswer, check, request_body

EOS = 2
SAMPLING = Sampling(
    max_new_tokens=4, temperature=0.7, top_p=0.9, logprobs=True, vocab_size=100, stop_ids=frozenset({EOS, 3})
)
PROMPT = [11, 22, 33]
RID = "row-1"
Body = dict[str, Any]


def stopped(ids: list[int] | None = None) -> Body:
    ids = [50, 51, EOS] if ids is None else ids
    meta = {
        "id": RID,
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": len(PROMPT),
        "completion_tokens": len(ids),
        "weight_version": "v1",
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
    }
    return {"text": "never read", "output_ids": ids, "prompt_token_ids": list(PROMPT), "meta_info": meta}


def cut_off(ids: list[int] | None = None) -> Body:
    body = stopped([50, 51, 52, 53] if ids is None else ids)
    body["meta_info"]["finish_reason"] = {"type": "length", "length": len(body["output_ids"])}
    return body


def changed(body: Body, path: str, value: Any) -> Body:
    """A copy of `body` in which the field at a dotted `path` is `value`; DELETED takes it out."""
    body = copy.deepcopy(body)
    *parents, name = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner: Any = body
    for parent in parents:
        inner = inner[parent]
    if value is DELETED:
        del inner[name]
    else:
        inner[name] = value
    return body


DELETED = object()
META = "meta_info"
LOGPROBS = "meta_info.output_token_logprobs"
FINISH = "meta_info.finish_reason"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        # nothing that could be an answer
        (None, "missing or of another type"),
        ([stopped()], "missing or of another type"),
        ("<html>", "missing or of another type"),
        ({}, "'meta_info' is missing"),
        # fields that are missing or of another type
        (changed(stopped(), "output_ids", DELETED), "'output_ids' is missing"),
        (changed(stopped(), "prompt_token_ids", DELETED), "'prompt_token_ids' is missing"),
        (changed(stopped(), f"{META}.completion_tokens", DELETED), "'completion_tokens' is missing"),
        (changed(stopped(), f"{META}.prompt_tokens", DELETED), "'prompt_tokens' is missing"),
        (changed(stopped(), f"{META}.weight_version", DELETED), "'weight_version' is missing"),
        (changed(stopped(), FINISH, DELETED), "'finish_reason' is missing"),
        (changed(stopped(), f"{FINISH}.type", DELETED), "'type' is missing"),
        (changed(stopped(), FINISH, None), "missing or of another type"),
        (changed(stopped(), FINISH, "stop"), "missing or of another type"),
        (changed(stopped(), META, [1]), "missing or of another type"),
        # another request's answer, another prompt
        (changed(stopped(), f"{META}.id", "row-2"), "it answers request row-2, not row-1"),
        (changed(stopped(), f"{META}.id", DELETED), "it answers request None, not row-1"),
        (changed(stopped(), f"{META}.prompt_tokens", 4), "read 4 prompt tokens that are not the 3 sent"),
        (changed(stopped(), "prompt_token_ids", [1, *PROMPT]), "prompt tokens that are not the 3 sent"),
        (changed(stopped(), "prompt_token_ids", [11, 33, 22]), "prompt tokens that are not the 3 sent"),
        (changed(stopped(), "prompt_token_ids", None), "prompt tokens that are not the 3 sent"),
        (changed(stopped(), "prompt_token_ids", 3), "prompt tokens that are not the 3 sent"),
        # speculation
        (changed(stopped(), f"{META}.spec_verify_ct", 2), "decodes speculatively"),
        # output ids
        (changed(stopped(), "output_ids", None), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids", "50 51 2"), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids", [50.0, 51.0, 2.0]), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids.0", True), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids.1", None), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids", [[50, 51, 2]]), "output_ids is not a list of whole numbers"),
        (changed(stopped(), "output_ids", []), "output_ids is empty"),
        (changed(stopped(), f"{META}.completion_tokens", 4), "completion_tokens is 4, but there are 3 output ids"),
        (changed(stopped(), "output_ids", [50, EOS]), "completion_tokens is 3, but there are 2 output ids"),
        (stopped([50, 100, EOS]), "output id 100 is outside the vocabulary of 100"),
        (stopped([50, -1, EOS]), "output id -1 is outside the vocabulary of 100"),
        # the end
        (stopped([50, EOS, 51, EOS]), "goes on behind stop token 2"),
        (cut_off([50, 3, 51, 52]), "goes on behind stop token 3"),
        (changed(stopped(), f"{FINISH}.matched", 3), "stop matched 3, but the answer ends in 2"),
        (changed(stopped(), f"{FINISH}.matched", DELETED), "stop matched None, but the answer ends in 2"),
        (changed(stopped(), f"{FINISH}.matched", "NaN happened"), "stop matched 'NaN happened'"),
        (changed(stopped(), f"{FINISH}.matched", 2.0), "stop matched 2.0"),
        (changed(stopped(), f"{FINISH}.matched", [2]), r"stop matched \[2\]"),
        (changed(stopped([50, 51]), f"{FINISH}.matched", EOS), "stop matched 2, but the answer ends in 51"),
        (stopped([50, 51]), "stop matched 51, but the answer ends in 51"),
        (cut_off([50, 51, 52]), "finish reason length after 3 of 4 tokens"),
        (cut_off([50, 51, 52, 53, 54]), "finish reason length after 5 of 4 tokens"),
        (cut_off([50, 51, 52, EOS]), "finish reason length, but the answer ends in stop token 2"),
        (changed(stopped(), FINISH, {"type": "mystery"}), "unknown finish reason 'mystery'"),
        (changed(stopped(), FINISH, {"type": None}), "unknown finish reason None"),
        # log-probabilities
        (changed(stopped(), LOGPROBS, DELETED), "output_token_logprobs is missing or malformed"),
        (changed(stopped(), LOGPROBS, None), "output_token_logprobs is missing or malformed"),
        (changed(stopped(), f"{LOGPROBS}.1", None), "output_token_logprobs is missing or malformed"),
        (changed(stopped(), f"{LOGPROBS}.1", [-0.25]), "output_token_logprobs is missing or malformed"),
        (changed(stopped(), f"{LOGPROBS}.1.1", 52), "the ids in output_token_logprobs are not the output ids"),
        (changed(stopped(), f"{LOGPROBS}.1", DELETED), "the ids in output_token_logprobs are not the output ids"),
        (changed(stopped(), f"{LOGPROBS}.1.0", None), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", 0.5), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", math.nan), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", -math.inf), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", "-0.25"), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", False), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", -1e300), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", -(10**400)), "a log-probability is not a number of at most 0"),
        (changed(stopped(), f"{LOGPROBS}.1.0", 10**400), "a log-probability is not a number of at most 0"),
    ],
)
def test_a_contradiction_is_refused_and_named(body: Any, words: str) -> None:
    with pytest.raises(WrongAnswer, match=words):
        check(body, RID, PROMPT, SAMPLING)


def test_an_answer_that_stopped_is_taken_as_it_is() -> None:
    assert check(stopped(), RID, PROMPT, SAMPLING) == Answer([50, 51, EOS], [-0.25] * 3, "stop", EOS, "v1")


@pytest.mark.parametrize("body", [stopped([3]), stopped([50, 51, 52, EOS]), cut_off()])
def test_one_token_a_stop_at_the_very_limit_and_a_cut_at_it_are_good_answers(body: Body) -> None:
    answer = check(body, RID, PROMPT, SAMPLING)
    assert answer.output_ids == body["output_ids"]
    assert answer.finish_reason == body[META]["finish_reason"]["type"]


def test_the_first_and_the_last_id_of_the_vocabulary_are_good() -> None:
    assert check(stopped([0, 99, EOS]), RID, PROMPT, SAMPLING).output_ids == [0, 99, EOS]


def test_a_log_probability_may_be_a_whole_zero_or_a_rounding_error_above_it() -> None:
    body = changed(changed(stopped(), f"{LOGPROBS}.0.0", 0), f"{LOGPROBS}.1.0", 1e-4)
    assert check(body, RID, PROMPT, SAMPLING).output_logprobs == [0, 1e-4, -0.25]


@pytest.mark.parametrize("matched", ["</s>", 10**20, [2]])
def test_an_answer_that_was_cut_matched_no_stop_whatever_the_server_says(matched: Any) -> None:
    assert check(changed(cut_off(), f"{FINISH}.matched", matched), RID, PROMPT, SAMPLING).matched_stop is None


def test_log_probabilities_that_nobody_asked_for_are_neither_needed_nor_kept() -> None:
    without = replace(SAMPLING, logprobs=False)
    assert check(changed(stopped(), LOGPROBS, DELETED), RID, PROMPT, without).output_logprobs is None
    assert check(stopped(), RID, PROMPT, without).output_logprobs is None


def test_the_text_is_never_read() -> None:
    for text in (DELETED, None, "something else"):
        assert check(changed(stopped(), "text", text), RID, PROMPT, SAMPLING).output_ids == [50, 51, EOS]


def test_an_abort_is_worth_another_try_and_is_not_a_wrong_answer() -> None:
    body = changed(stopped([50]), FINISH, {"type": "abort", "message": "Aborted", "status_code": None})
    with pytest.raises(Transient, match="abort: Aborted") as caught:
        check(body, RID, PROMPT, SAMPLING)
    assert type(caught.value) is Transient
    assert caught.value.cause == "abort"


def test_a_request_pins_every_sampling_field_that_a_server_has_defaults_for() -> None:
    body = request_body(RID, PROMPT, SAMPLING)
    assert body["input_ids"] == PROMPT
    assert body["return_prompt_token_ids"] is True
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [2, 3],
    }


@pytest.mark.parametrize(
    "make", [lambda: Transient("HTTP 429", "busy", 2.0), lambda: WrongAnswer("why"), lambda: Unauthorized(401, "no")]
)
def test_an_error_travels_between_processes_whole(make: Callable[[], Exception]) -> None:
    error = make()
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
