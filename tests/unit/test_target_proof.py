"""The self-check lets an honest target through and stops each kind of broken one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.proof import SelfCheckFailed, second_route, self_check
from eagle3_ray.target.protocol import States, Target, TargetParts, TokenSequence
from eagle3_ray.target.transformers_backend import TransformersTarget
from tests import sabotage
from tests.tiny_model import sequences, tiny_llama


@dataclass
class Probe:
    folder: Path
    target: TransformersTarget
    parts: TargetParts
    sequence: TokenSequence
    logprobs: np.ndarray
    reference: States

    def check(self, target: Target | None = None, parts: TargetParts | None = None) -> None:
        self_check(target or self.target, parts or self.parts, self.sequence, self.logprobs, reference=self.reference)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tiny_llama(tmp_path_factory.mktemp("proof"))
    target = TransformersTarget(folder, (2, 4, 6), "float32", device="cpu")
    [sequence] = sequences([40])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(sequence.ids).long()
    with torch.no_grad():
        said = torch.log_softmax(model(ids[None]).logits[0], dim=1)
    logprobs = said[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    reference = second_route(folder, target.layers, sequence, torch.float32)
    return Probe(folder, target, load_parts(folder, torch.float32), sequence, logprobs, reference)


def test_an_honest_target_passes(probe: Probe) -> None:
    probe.check()


@pytest.mark.parametrize("name", sabotage.CHANGES)
def test_states_that_were_mixed_up_are_found(probe: Probe, name: str) -> None:
    with pytest.raises(SelfCheckFailed):
        probe.check(sabotage.Sabotaged(probe.target, sabotage.CHANGES[name]()))


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_layer_off_by_one_is_found(probe: Probe, number: int, by: int) -> None:
    with pytest.raises(SelfCheckFailed, match="a second route finds other states"):
        probe.check(sabotage.off_by_one(probe.folder, probe.target.layers, number, by, "float32"))


def test_a_state_before_the_norm_is_found_without_a_second_route(probe: Probe) -> None:
    target = sabotage.before_the_norm(probe.folder, probe.target.layers, "float32")
    with pytest.raises(SelfCheckFailed, match="not behind the final norm"):
        self_check(target, probe.parts, probe.sequence, probe.logprobs)


def test_the_head_of_a_sister_model_is_found(probe: Probe) -> None:
    with pytest.raises(SelfCheckFailed, match="are of different models"):
        probe.check(parts=sabotage.other_head(probe.parts))


def test_an_unproved_head_is_said(probe: Probe) -> None:
    with pytest.warns(UserWarning, match="the output head is not proved"):
        self_check(probe.target, probe.parts, probe.sequence, None)


def test_the_recorded_answer_alone_proves_the_head_at_its_temperature(probe: Probe) -> None:
    ids = torch.from_numpy(probe.sequence.ids).long()
    model = AutoModelForCausalLM.from_pretrained(probe.folder, dtype=torch.float32)
    with torch.no_grad():
        said = torch.log_softmax(model(ids[None]).logits[0] / 0.7, dim=1)[:-1].gather(1, ids[1:, None])[:, 0]
    self_check(probe.target, probe.parts, probe.sequence, said[-12:].numpy(), temperature=0.7)
    with pytest.raises(SelfCheckFailed):
        self_check(probe.target, probe.parts, probe.sequence, said[-12:].numpy(), temperature=1.0)
