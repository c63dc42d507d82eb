"""Replaying a recorded answer takes the verify steps that decoding it takes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_ray.acceptance import replay as module
from eagle3_ray.acceptance.reference import CachedTransformers, decode
from eagle3_ray.acceptance.replay import matched_drafts, replay, walk
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.propose import propose
from eagle3_ray.target.protocol import States, TokenSequence

VOCAB, HIDDEN, LAYERS = 12, 32, (2, 3, 4)
TARGET = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "initializer_range": 0.5,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def make_drafter(seed: int, norm_output: bool = False) -> Eagle3Drafter:
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(DrafterConfig.from_target(TARGET, LAYERS, 6, norm_output=norm_output))
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.d2t.copy_(torch.arange(6))  # the even tokens
    return drafter


def test_decoding_goes_on_behind_what_matched_and_the_targets_own_token() -> None:
    assert walk([2, 0, 0, 0, 1, 0, 0]) == [2, 0, 1, 0]
    assert walk([]) == []


@pytest.mark.parametrize("norm_output", [False, True])
def test_all_chains_at_once_match_what_proposing_one_after_the_other_matches(
    norm_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUERIES", 7)  # several blocks, the last one not full
    drafter = make_drafter(1, norm_output)
    generator = torch.Generator().manual_seed(2)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    aux_hidden = torch.randn(60, 3 * HIDDEN, generator=generator)
    ids = [1, 2, 3]
    while len(ids) < 60:  # stretches that the drafter guesses, and tokens that it cannot guess between them
        drafts, _ = propose(drafter, embed, aux_hidden[: len(ids) - 1], torch.tensor(ids), 4)
        ids += [*drafts[: len(ids) % 4], 2 * (len(ids) % 6) + 1]
    sequence = torch.tensor(ids[:60])
    expected = []
    for newest in range(3, 59):
        drafts, _ = propose(drafter, embed, aux_hidden[:newest], sequence[: newest + 1], 4)
        truth = sequence[newest + 1 : newest + 5].tolist()
        expected.append(next((n for n, (a, b) in enumerate(zip(drafts, truth, strict=False)) if a != b), len(truth)))
    assert {0, 1, 2, 3} <= set(expected)
    assert matched_drafts(drafter, embed, aux_hidden, sequence, 4, first=3) == expected


def test_a_replayed_answer_takes_as_many_verify_steps_as_the_reference_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TARGET)).save_pretrained(tmp_path)
    target = CachedTransformers(tmp_path, LAYERS)
    embed = target.model.get_input_embeddings().weight.detach()
    drafter = make_drafter(3)
    recorded, decoded_steps = [], 0
    for n in range(8):
        prompt = [n, 3, n + 1]
        decoded = decode(
            target, partial(propose, drafter, embed), drafter.target_ids(), prompt,
            steps=3, max_new_tokens=40, stop_ids=(),
        )  # fmt: skip
        ids = prompt + decoded.output_ids
        target.forget(0)
        _, aux_hidden = target.read(ids)
        sequence = TokenSequence(str(n), np.array(ids, dtype=np.int32), len(prompt))
        recorded.append((sequence, States(str(n), aux_hidden, aux_hidden[:, :HIDDEN])))
        decoded_steps += decoded.acceptance.verify_steps
    result = replay(drafter, embed, recorded, 3)
    assert result.verify_steps == decoded_steps
    assert decoded_steps < 8 * 39, "some drafts are right by chance: one token in twelve"
    assert result.tokens == 8 * 39


def test_states_of_other_tokens_are_refused() -> None:
    drafter = make_drafter(1)
    with pytest.raises(ValueError, match="aux_hidden has 5 rows for 6 tokens"):
        matched_drafts(drafter, torch.zeros(VOCAB, HIDDEN), torch.zeros(5, 96), torch.arange(6), 3, first=2)
    with pytest.raises(ValueError, match="at least one token before the answer"):
        matched_drafts(drafter, torch.zeros(VOCAB, HIDDEN), torch.zeros(6, 96), torch.arange(6), 3, first=0)
