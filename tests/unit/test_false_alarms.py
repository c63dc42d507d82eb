"""A thousand answers of a real model in miniature raise no alarm; done to the same answers, each corruption does.

The same corruptions are done to answers of a real SGLang in tests/engine/test_capture_backends.py.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from eagle3_ray import corpus
from eagle3_ray.audit import AuditRules, Evidence, judge
from eagle3_ray.sglang.protocol import Sampling, check
from eagle3_ray.target.on_policy import OnPolicyLimits, Score, on_policy
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.protocol import TargetParts
from eagle3_ray.target.transformers_backend import TransformersTarget
from tests.corruptions import Generated, corruptions
from tests.runs import make_run, sequence
from tests.tiny_target import END_OF_TEXT, END_THINK, IM_END, IM_START, THINK, VOCAB_SIZE
from tests.writing_model import make_tiny_model

ANSWERS, TOKENS = 1000, 24
RULES = AuditRules(frozenset({IM_END, END_OF_TEXT}), frozenset(range(5)), frozenset(), 16, 200)
LIMITS = OnPolicyLimits()
CORRUPTIONS = corruptions(IM_START, IM_END, [THINK, END_THINK], lambda token: [token // 2 + 5, token // 3 + 5])


@dataclass
class Model:
    folder: Path
    target: TransformersTarget
    parts: TargetParts

    def scores(self, rows: list[Generated]) -> list[Score]:
        """How well each row fits the target's own states of its tokens."""
        asked = [row.sequence(str(number)) for number, row in enumerate(rows)]
        return [
            on_policy(states, one, row.logprobs, self.parts, temperature=row.temperature)
            for states, one, row in zip(self.target.capture(asked), asked, rows, strict=True)
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model, which hardly ever finds a special token likely."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    quiet = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        quiet.lm_head.weight[:5] = 0.0
    quiet.save_pretrained(folder)
    target = TransformersTarget(folder, (2, 4, 5), "float32", device="cpu")
    return Model(folder, target, load_parts(folder, torch.float32))


@pytest.fixture(scope="module")
def answers(model: Model) -> list[Generated]:
    """Half of them greedy, half drawn from the 50 likeliest tokens; the log-probabilities are those of all tokens."""
    return [*_answers(model.folder, 0.0), *_answers(model.folder, 1.0)]


@torch.inference_mode()
def _answers(folder: Path, temperature: float) -> list[Generated]:
    writer = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    body = torch.randint(5, VOCAB_SIZE, (ANSWERS // 2, 22), generator=generator)
    around = torch.tensor([IM_START, 300, IM_END, 301]).expand(len(body), -1)
    ids = torch.cat([around, body, around[:, 2:3], around[:, :1], around[:, 1:2]], dim=1)
    prompt_tokens = ids.shape[1]
    new, cache = ids, None
    for _ in range(TOKENS):
        read = writer(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        likeliest, cache = read.logits[:, -1].topk(50), read.past_key_values
        drawn = torch.multinomial(likeliest.values.softmax(-1), 1, generator=generator)
        new = likeliest.indices.gather(1, drawn if temperature else torch.zeros_like(drawn))
        ids = torch.cat([ids, new], dim=1)
    said = writer(ids).logits[:, prompt_tokens - 1 : -1].log_softmax(-1)
    logprobs = said.gather(2, ids[:, prompt_tokens:, None])[:, :, 0]
    return [
        Generated(row[:prompt_tokens].tolist(), row[prompt_tokens:].tolist(), told.tolist(), temperature)
        for row, told in zip(ids, logprobs, strict=True)
    ]


def test_a_thousand_clean_answers_raise_no_alarm(model: Model, answers: list[Generated], tmp_path: Path) -> None:
    """From the server's answer over audit and corpus to the on-policy check, one by one and all together."""
    evidence, rows = Evidence(), []
    for number, row in enumerate(answers):
        sampling = Sampling(TOKENS, row.temperature, 1.0, True, VOCAB_SIZE, RULES.stop_ids)
        answer = check(_body(row), "r", row.prompt, sampling)
        reason = judge(answer.output_ids, False, RULES)
        assert reason is None
        evidence.add(row.prompt, answer.output_ids, False, reason, RULES)
        rows.append(sequence(f"q{number}", row.prompt, answer.output_ids, answer.output_logprobs))
    assert evidence.finding("p", RULES) is None
    made = corpus.make(make_run(tmp_path / "run", rows))
    assert (len(made), corpus.damaged(made)) == (ANSWERS, [])
    scores = model.scores(answers)
    assert {LIMITS.reason(score) for score in scores} == {None}
    assert LIMITS.reason_for_all(scores) is None


def _body(row: Generated) -> dict[str, object]:
    meta = {
        "id": "r",
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(row.prompt),
        "completion_tokens": len(row.answer),
        "weight_version": "default",
        "output_token_logprobs": [[said, token] for said, token in zip(row.logprobs, row.answer, strict=True)],
    }
    return {"output_ids": row.answer, "prompt_token_ids": row.prompt, "meta_info": meta}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_answer_is_set_aside(model: Model, answers: list[Generated], name: str) -> None:
    corrupt = CORRUPTIONS[name]
    some = [*answers[:10], *answers[-10:]]
    changed = [corrupt(row, other) for row, other in zip(some, [*some[1:], some[0]], strict=True)]
    reasons = [
        LIMITS.reason(score)
        for score, row, clean in zip(model.scores(changed), changed, some, strict=True)
        if row != clean  # greedy answers repeat themselves: a swap can change nothing
    ]
    assert len(reasons) >= 15
    assert None not in reasons
