"""What is trained is what is served: SGLang, given an exported drafter, accepts just what our own drafting predicts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle3_ray.drafter.checkpoints import load_drafter
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import export, speculative_arguments
from eagle3_ray.drafter.initialise import initialise
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.propose import propose
from eagle3_ray.drafter.rollout import TargetHead, rollout
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.sglang_cpu import Server

STEPS = 3  # of drafting, in the server and here
NEW_TOKENS = 40
PROMPTS = (  # "What is gravity?" and "Name three colours." in the model's chat template, less its system message
    [1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198],
    [1, 4093, 198, 5820, 1296, 14797, 30, 2, 198, 1, 520, 9531, 198],
)


class Target:
    """SmolLM2 in float32: greedy answers, states and the two matrices that the drafter shares."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None  # as the server with ignore_eos
        matrix = model.get_input_embeddings().weight.detach()
        self.head, self.final_norm = TargetHead(matrix, matrix), model.model.norm.weight.detach()
        self.sequences, self.aux, self.last = [], [], []
        with torch.no_grad():
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                ids = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
                )
                states = model(ids, output_hidden_states=True).hidden_states
                self.sequences.append(ids[0])
                self.aux.append(torch.cat([states[layer][0] for layer in (2, 15, 27)], dim=-1))
                self.last.append(states[-1][0])

    def batch(self) -> PackedBatch:
        lengths = torch.tensor([0, *(len(ids) for ids in self.sequences)])
        answers = [torch.arange(len(i)) >= len(p) for i, p in zip(self.sequences, PROMPTS, strict=True)]
        return PackedBatch(
            torch.cat(self.sequences), torch.cat(self.aux), torch.cat(self.last), lengths.cumsum(0), torch.cat(answers)
        )


@pytest.fixture(scope="module")
def target(cpu_model: Path) -> Target:
    return Target(cpu_model)


def half_learnt(target: Target, **switches: bool) -> Eagle3Drafter:
    """A drafter that is often right about these answers, and often wrong."""
    generator = torch.Generator().manual_seed(0)
    batch = target.batch()
    drafter = Eagle3Drafter(DrafterConfig.from_target(target.config, draft_vocab_size=512, **switches))
    counts = torch.bincount(batch.input_ids[batch.loss_mask], minlength=len(drafter.t2d))
    vocabulary = DraftVocabulary.from_counts(counts, 512, always=[0, 1, 2])
    initialise(drafter, vocabulary, target.head.lm_head, target.final_norm, batch.aux_hidden, generator)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    for _ in range(20):
        result = rollout(drafter, batch, target.head, ttt_steps=STEPS)
        (result.loss / result.step_counts[0]).backward()
        optimiser.step()
        optimiser.zero_grad()
    return drafter


def predicted(drafter: Eagle3Drafter, target: Target, number: int) -> tuple[int, int]:
    """Verifications and accepted drafts while the server generates answer `number`."""
    ids, aux = target.sequences[number], target.aux[number]
    known, verifications, accepted = len(PROMPTS[number]), 0, 0  # `known` tokens have states; one more is verified
    while known + 1 < len(ids):
        drafts, _ = propose(drafter, target.head.embed_tokens, aux[:known], ids[: known + 1], STEPS)
        right = leading_matches(drafts, ids[known + 1 :])
        verifications, accepted, known = verifications + 1, accepted + right, known + 1 + right
    return verifications, accepted


def leading_matches(drafts: Sequence[int], said: Tensor) -> int:
    wrong = [i for i, (draft, token) in enumerate(zip(drafts, said.tolist(), strict=False)) if draft != token]
    return wrong[0] if wrong else min(len(drafts), len(said))


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle-3", "eagle-3.1"])
def test_the_server_accepts_what_our_own_drafting_predicts(
    cpu_model: Path, target: Target, switches: dict[str, bool], tmp_path: Path
) -> None:
    drafter = half_learnt(target, **switches)
    folder = tmp_path / "drafter"
    export(drafter, folder, target.config, torch.float32)
    served = load_drafter(folder, target.config)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with Server(cpu_model, args=speculative_arguments(folder, 3), log=tmp_path / "server.log") as server:
        for number, prompt in enumerate(PROMPTS):
            request = {"input_ids": prompt, "sampling_params": sampling}
            answer = requests.post(server.url + "/generate", json=request, timeout=300).json()
            verifications, accepted = predicted(served, target, number)
            assert answer["output_ids"] == target.sequences[number][len(prompt) :].tolist()
            assert answer["meta_info"]["spec_verify_ct"] == verifications
            assert answer["meta_info"]["spec_num_correct_drafts"] == accepted
            assert NEW_TOKENS / STEPS / 1.5 < verifications < NEW_TOKENS * 0.8  # neither all right nor all wrong
