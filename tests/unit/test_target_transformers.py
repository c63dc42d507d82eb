"""The transformers backend against transformers' own list of hidden states."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3_ray.capturer import CaptureSettings, _open
from eagle3_ray.corpus import Corpus
from eagle3_ray.target.files import TargetError
from eagle3_ray.target.packed_attention import PACKED
from eagle3_ray.target.proof import second_route
from eagle3_ray.target.protocol import CaptureError, States, TokenSequence
from eagle3_ray.target.transformers_backend import TransformersTarget
from tests.tiny_model import model_with_code, sequences, tiny_gemma, tiny_llama

LAYERS = (2, 4, 5)  # what auto means for eight layers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def target(llama: Path) -> TransformersTarget:
    return TransformersTarget(llama, dtype="float32", device="cpu", batch_tokens=64)


def by_transformers(folder: Path, sequence: TokenSequence) -> States:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.from_numpy(sequence.ids).long()[None], output_hidden_states=True)
    # transformers puts the normed state last in the list
    aux = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=1)
    return States(sequence.sequence_id, aux, out.hidden_states[-1][0])


def agree(folder: Path, found: list[States], asked: list[TokenSequence]) -> None:
    for states, sequence in zip(found, asked, strict=True):
        expected = by_transformers(folder, sequence)
        assert states.sequence_id == sequence.sequence_id
        torch.testing.assert_close(states.aux_hidden, expected.aux_hidden, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(states.last_hidden, expected.last_hidden, atol=2e-4, rtol=1e-3)


def test_packed_sequences_have_the_states_that_they_have_alone(llama: Path, target: TransformersTarget) -> None:
    asked = sequences([5, 30, 1, 64, 17, 90])
    assert target.layers == LAYERS
    assert target._decoder.config._attn_implementation == PACKED
    agree(llama, target.capture(asked), asked)


def test_a_sliding_window_is_left_to_the_models_own_attention(tmp_path: Path) -> None:
    folder = tiny_gemma(tmp_path)
    target = TransformersTarget(folder, dtype="float32", device="cpu", batch_tokens=256)
    asked = sequences([40, 50, 25])
    assert target._decoder.config._attn_implementation != PACKED
    assert target.packed
    agree(folder, target.capture(asked), asked)


def test_chunks_that_are_longer_than_any_probe_are_left_to_the_models_own_attention(tmp_path: Path) -> None:
    """Llama 4 says only in its configuration that a token sees no more than its chunk."""
    folder = tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for own in ({"attention_chunk_size": 8192}, {"layer_types": ["full_attention", "chunked_attention"] * 4}):
        (folder / "config.json").write_text(json.dumps(config | own))
        target = TransformersTarget(folder, dtype="float32", device="cpu")
        assert target._decoder.config._attn_implementation != PACKED


def test_prefill_reads_the_same_batches_as_capture_and_keeps_nothing(target: TransformersTarget) -> None:
    asked = sequences([20, 30, 40, 50])
    read: list[list[int]] = []
    hook = target._decoder.register_forward_pre_hook(
        lambda _model, _args, inputs: read.append(inputs["input_ids"][0].tolist()), with_kwargs=True
    )
    target.capture(asked)
    captured, read[:] = list(read), []
    target.prefill(asked)
    hook.remove()
    assert read == captured
    assert [token for batch in read for token in batch] == [i for sequence in asked for i in sequence.ids.tolist()]
    assert target._inputs == {}


def test_a_sequence_does_not_keep_the_rest_of_its_batch_in_memory(target: TransformersTarget) -> None:
    for states in target.capture(sequences([20, 30])):
        assert states.aux_hidden.untyped_storage().nbytes() == states.aux_hidden.nbytes
        assert states.last_hidden.untyped_storage().nbytes() == states.last_hidden.nbytes


def test_states_can_be_trained_on(target: TransformersTarget) -> None:
    [states] = target.capture(sequences([4]))
    weight = torch.ones(96, requires_grad=True)
    (states.aux_hidden * weight).sum().backward()
    torch.testing.assert_close(weight.grad, states.aux_hidden.sum(dim=0))


def out_of_memory_above(tokens: int, forward: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def limited(*, input_ids: torch.Tensor, **more: Any) -> Any:
        if input_ids.numel() > tokens:
            raise torch.OutOfMemoryError("no room")
        seen.append(input_ids.numel())
        return forward(input_ids=input_ids, **more)

    return limited


def test_out_of_memory_halves_the_batch_says_so_once_and_loses_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TransformersTarget(llama, dtype="float32", device="cpu", batch_tokens=64)
    seen: list[int] = []
    monkeypatch.setattr(target._decoder, "forward", out_of_memory_above(40, target._decoder.forward, seen))
    asked = sequences([20] * 6)
    with pytest.warns(UserWarning, match="going on with 30 ") as warned:
        found = target.capture(asked)
    assert len(warned) == 1
    assert seen == [20] * 6
    agree(llama, found, asked)


def test_a_sequence_that_fits_nowhere_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(llama, dtype="float32", device="cpu")
    monkeypatch.setattr(target._decoder, "forward", out_of_memory_above(8, target._decoder.forward, []))
    with pytest.raises(CaptureError, match="Sequence s0 of 9 tokens alone does not fit"):
        target.capture(sequences([9]))


def test_a_model_of_its_own_code_is_refused_until_that_code_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = model_with_code(tmp_path / "odd")
    [asked] = sequences([12])
    refusal = r"target\.trust_remote_code=false, and \S+odd can only be loaded by the Python code in it"
    settings = CaptureSettings(cast(Corpus, None), folder, LAYERS, "transformers", "float32", 0, 1, 1024, 1.0)
    with pytest.raises(TargetError, match=refusal):
        _open(settings, None)
    with pytest.raises(TargetError, match=refusal):
        second_route(folder, LAYERS, asked, torch.float32)
    assert not (tmp_path / "modules").exists()  # nothing of it ran
    target = _open(replace(settings, trust_remote_code=True), None)
    agree(llama, target.capture([asked]), [asked])
    states = second_route(folder, LAYERS, asked, torch.float32, trust_remote_code=True)
    agree(llama, [states], [asked])
