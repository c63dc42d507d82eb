"""Whatever a server answers is a sound answer or a named error, and what is taken can be stored."""

import copy
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from eagle3_ray.acceptance.engine import read_answer
from eagle3_ray.acceptance.questions import EvalPrompt
from eagle3_ray.records import SEQUENCE_SCHEMA
from eagle3_ray.sglang.protocol import Sampling, Transient, check

SAMPLING = Sampling(4, 0.7, 0.9, True, 100, frozenset({2, 3}))
PROMPT = EvalPrompt("set", "", "a", 0, (11, 22, 33))
GOOD: dict[str, Any] = {
    "output_ids": [50, 51, 2],
    "prompt_token_ids": [11, 22, 33],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "weight_version": "v1",
        "output_token_logprobs": [[-0.25, 50, None], [-0.5, 51, None], [-1, 2, None]],
        "spec_verify_ct": 1,
        "spec_correct_drafts_histogram": [0, 1],
        "num_retractions": 0,
    },
}
_VALUE: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [10**400, -(10**400), float("inf"), float("nan"), -1e300, 2**31, 2, 3, 50, "stop", "length", "abort"]
    )
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, one in inner for place in _places(one, (*before, key)))]


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """A good answer with one to three of its values replaced or taken out."""
    body = copy.deepcopy(GOOD)
    if draw(st.booleans()):
        for name in ("spec_verify_ct", "spec_correct_drafts_histogram"):
            del body["meta_info"][name]
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([place for place in _places(body) if place] or [("output_ids",)]))
        parent: Any = body
        for step in way:
            parent = parent[step]
        if draw(st.booleans()):
            parent[last] = draw(_VALUE)
        else:
            del parent[last]
    return body


@given(bodies() | _VALUE)
def test_an_answer_is_sound_or_refused(body: Any) -> None:
    try:
        answer = check(body, "r", PROMPT.prompt_ids, SAMPLING)
    except Transient:
        return
    assert all(type(token) is int and 0 <= token < 100 for token in answer.output_ids)
    assert (answer.finish_reason == "stop") == (answer.output_ids[-1] in SAMPLING.stop_ids)
    assert len(answer.output_logprobs or ()) == len(answer.output_ids)
    row = {
        "output_ids": answer.output_ids,
        "output_logprobs": answer.output_logprobs,
        "finish_reason": answer.finish_reason,
        "matched_stop": answer.matched_stop,
    }
    [stored] = pa.Table.from_pylist([row], schema=SEQUENCE_SCHEMA).to_pylist()
    assert all(value > float("-inf") for value in stored["output_logprobs"])


@given(bodies() | _VALUE)
def test_a_measured_answer_is_sound_or_refused(body: Any) -> None:
    try:
        served = read_answer(body, "r", PROMPT, SAMPLING)
    except Transient:
        return
    assert served.acceptance is None or 1 <= (served.acceptance.length or 1) <= 6
