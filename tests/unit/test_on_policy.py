"""Scores of answers against a softmax written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle3_ray.audit import kind_of
from eagle3_ray.target.on_policy import OnPolicyLimits, Score, label_logprobs, on_policy
from eagle3_ray.target.protocol import CaptureError, States, TargetParts, TokenSequence

H, V, T, PROMPT = 8, 50, 30, 10


@pytest.fixture
def parts() -> TargetParts:
    torch.manual_seed(0)
    head = torch.randn(V, H)
    return TargetParts(head, head, torch.ones(H), {})


@pytest.fixture
def states() -> States:
    torch.manual_seed(1)
    return States("a", torch.randn(T, 3 * H), torch.randn(T, H))


def greedy_ids(states: States, parts: TargetParts) -> np.ndarray:
    """Token t + 1 is the likeliest behind state t."""
    top = (states.last_hidden @ parts.lm_head.T).argmax(dim=1)
    return np.concatenate([[0], top[:-1].numpy()]).astype(np.int32)


def by_hand(states: States, parts: TargetParts, ids: np.ndarray, temperature: float) -> list[float]:
    found = []
    for position in range(PROMPT, T):
        logits = (states.last_hidden[position - 1].double() @ parts.lm_head.double().T) / temperature
        found.append(float(logits[ids[position]] - torch.log(torch.exp(logits).sum())))
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_clean_answer_differs_by_rounding_only(states: States, parts: TargetParts, temperature: float) -> None:
    ids = np.random.default_rng(0).integers(V, size=T, dtype=np.int32)
    recorded = by_hand(states, parts, ids, temperature)
    score = on_policy(states, TokenSequence("a", ids, PROMPT), recorded, parts, temperature=temperature)
    assert score.tokens == T - PROMPT
    assert score.mean_difference is not None
    assert score.mean_difference < 1e-5
    assert score.mean_logprob == pytest.approx(np.mean(recorded), abs=1e-5)
    assert OnPolicyLimits().reason(score) is None


def test_a_temperature_that_was_not_the_recorded_one_shows(states: States, parts: TargetParts) -> None:
    ids = np.random.default_rng(0).integers(V, size=T, dtype=np.int32)
    recorded = by_hand(states, parts, ids, 0.5)
    score = on_policy(states, TokenSequence("a", ids, PROMPT), recorded, parts, temperature=1.0)
    assert "differ from the recorded ones" in str(OnPolicyLimits().reason(score))


def test_a_greedy_answer_needs_no_recorded_values(states: States, parts: TargetParts) -> None:
    ids = greedy_ids(states, parts)
    clean = on_policy(states, TokenSequence("a", ids, PROMPT), None, parts, temperature=0)
    assert (clean.argmax_agreement, clean.mean_difference) == (1.0, None)
    assert OnPolicyLimits().reason(clean) is None
    ids[PROMPT + 3] = (ids[PROMPT + 3] + 1) % V
    wrong = on_policy(states, TokenSequence("a", ids, PROMPT), None, parts, temperature=0)
    assert wrong.argmax_agreement == pytest.approx(1 - 1 / (T - PROMPT))
    assert "only 95.0% of a greedy answer" in str(OnPolicyLimits().reason(wrong))


def test_a_few_bad_tokens_in_a_long_answer_show_in_the_worst_window(states: States, parts: TargetParts) -> None:
    ids = np.random.default_rng(0).integers(V, size=T, dtype=np.int32)
    recorded = by_hand(states, parts, ids, 1.0)
    recorded[7] += 0.016  # mean over 20 tokens 0.0008, over 8 neighbours 0.002
    score = on_policy(states, TokenSequence("a", ids, PROMPT), recorded, parts, temperature=1.0)
    assert score.mean_difference == pytest.approx(0.0008, abs=1e-4)
    assert score.worst_window == pytest.approx(0.002, abs=1e-4)


def test_chunks_of_the_vocabulary_and_of_the_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head, hidden, labels = torch.randn(101, 8), torch.randn(23, 8), torch.randint(101, (23,))
    parts = TargetParts(head, head, torch.ones(8), {})
    expected = torch.log_softmax(hidden @ head.T, dim=1).gather(1, labels[:, None])[:, 0]
    monkeypatch.setattr("eagle3_ray.target.on_policy._VOCAB_CHUNK", 20)
    monkeypatch.setattr("eagle3_ray.target.on_policy._ROW_CHUNK", 5)
    logprobs, top = label_logprobs(hidden, labels, parts)
    torch.testing.assert_close(logprobs, expected)
    assert torch.equal(top, (hidden @ head.T).argmax(dim=1))


def test_a_soft_cap_is_the_targets_own() -> None:
    torch.manual_seed(0)
    head, hidden, labels = 10 * torch.randn(31, 8), torch.randn(5, 8), torch.randint(31, (5,))
    parts = TargetParts(head, head, torch.ones(8), {"final_logit_softcapping": 30.0})
    expected = torch.log_softmax(30 * torch.tanh(hidden @ head.T / 30), dim=1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(label_logprobs(hidden, labels, parts)[0], expected)


def test_an_answer_from_the_first_token_on_and_one_without_tokens_are_told(states: States, parts: TargetParts) -> None:
    ids = np.random.default_rng(0).integers(V, size=T, dtype=np.int32)
    assert on_policy(states, TokenSequence("a", ids, 0), None, parts, temperature=1).tokens == T - 1
    empty = on_policy(states, TokenSequence("a", ids, T), None, parts, temperature=1)
    assert OnPolicyLimits().reason(empty) == "no answer token"


def test_a_small_change_of_all_sequences_shows_in_their_median() -> None:
    honest = Score(40, "bfloat16", False, 0.02, 0.03, 0.06, 0.9, -0.4, torch.empty(0))
    moved = replace(honest, mean_difference=0.05, worst_window=0.09, relative_difference=0.16)
    limits = OnPolicyLimits()
    assert limits.reason(moved) is None
    assert limits.reason_for_all([honest] * 20) is None
    assert limits.reason_for_all([honest] * 11 + [moved] * 9) is None
    assert "half of 20 sequences" in str(limits.reason_for_all([honest] * 9 + [moved] * 11))
    assert limits.reason_for_all([moved] * 8) is None


def test_recorded_values_of_another_length_are_refused(states: States, parts: TargetParts) -> None:
    ids = np.zeros(T, np.int32)
    with pytest.raises(CaptureError, match="19 recorded log-probabilities of 20 answer tokens"):
        on_policy(states, TokenSequence("a", ids, PROMPT), [0.0] * 19, parts, temperature=1)


BY = "log-probabilities differ from the recorded ones by N"
WRONG = {
    "mean_difference": f"{BY} nats over N tokens, limit N",
    "worst_window": "log-probabilities of N neighbours differ from the recorded ones by N nats, limit N",
    "relative_difference": f"{BY} of the tokens' doubt over N tokens, limit N",
    "argmax_agreement": "only N% of a greedy answer are the target's first choice over N tokens, limit N%",
}


@pytest.mark.parametrize("field", WRONG)
def test_reasons_of_one_limit_are_of_one_kind(field: str) -> None:
    whole = Score(30, "float32", True, 0.0, 0.0, 0.0, 1.0, -1.0, torch.empty(0))
    values = (0.1, 0.25, 0.5) if field == "argmax_agreement" else (0.0123, 0.5, 12.0, 3.4e7)
    reasons = {
        str(OnPolicyLimits().reason(replace(whole, **{field: value}, tokens=tokens)))  # type: ignore[arg-type]
        for value in values
        for tokens in (3, 40)
    }
    assert len(reasons) >= 3
    assert {kind_of(reason) for reason in reasons} == {WRONG[field]}
