"""Parts, layers and contracts of the target."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle3_ray.target.files import TargetError
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.protocol import CaptureError, States, TokenSequence
from tests.tiny_model import sequences, tiny_llama


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_parts_are_the_models_own_in_one_file_or_many(tmp_path: Path, shard: str) -> None:
    folder = tiny_llama(tmp_path, shard=shard)
    model = AutoModelForCausalLM.from_pretrained(folder)
    parts = load_parts(folder, torch.float32)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "40KB")
    assert torch.equal(parts.embed_tokens, model.model.embed_tokens.weight)
    assert torch.equal(parts.lm_head, model.lm_head.weight)
    assert torch.equal(parts.norm, model.model.norm.weight)
    assert parts.config["num_hidden_layers"] == 8
    assert load_parts(folder, torch.bfloat16).norm.dtype == torch.bfloat16


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    parts = load_parts(tiny_llama(tmp_path, tied=True), torch.float32)
    assert parts.lm_head is parts.embed_tokens


def test_a_language_model_inside_a_multimodal_one_is_found(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    plain = load_file(folder / "model.safetensors")
    vision = {"vision_tower.norm.weight": torch.zeros(7)}
    save_file({f"language_model.{name}": t for name, t in plain.items()} | vision, folder / "model.safetensors")
    parts = load_parts(folder, torch.float32)
    assert torch.equal(parts.norm, plain["model.norm.weight"])
    assert torch.equal(parts.lm_head, plain["lm_head.weight"])
    assert parts.config["num_hidden_layers"] == 8


def test_a_quantised_head_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TargetError, match="holds no lm_head"):
        load_parts(folder, torch.float32)
    save_file(tensors | {"lm_head.weight": head.to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(TargetError, match=r"stored as torch\.int8"):
        load_parts(folder, torch.float32)
    packed = {"lm_head.weight_packed": head.to(torch.int8), "lm_head.weight_scale": torch.ones(400, 1)}
    save_file(tensors | packed, folder / "model.safetensors")
    with pytest.raises(TargetError, match=r"head or embedding quantised \(lm_head\.weight_packed\)"):
        load_parts(folder, torch.float32)


@pytest.mark.parametrize("layers", [(2, 4), (2, 2, 5), (5, 4, 2), (0, 4, 5), (2, 4, 8)])
def test_layers_that_no_drafter_can_use_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match="three different layers from 1 to 7"):
        resolve_layers({"num_hidden_layers": 8}, layers)


def test_default_layers_of_kimi_are_those_of_its_language_model() -> None:
    assert resolve_layers({"text_config": {"num_hidden_layers": 61}}) == (2, 30, 58)


def test_a_target_that_does_not_tell_its_number_of_layers_is_refused() -> None:
    with pytest.raises(TargetError, match="does not tell num_hidden_layers"):
        resolve_layers({"num_layers": 28})


def test_states_of_another_sequence_or_shape_are_refused() -> None:
    [sequence] = sequences([6])
    good = {"aux_hidden": torch.zeros(6, 12), "last_hidden": torch.zeros(6, 4)}
    States("s0", **good).check(sequence, 4, torch.float32)
    wrong: dict[str, States] = {
        "came back for": States("s1", **good),
        "chunked prefill or a cache hit": States("s0", torch.zeros(5, 12), torch.zeros(5, 4)),
        "not \\(6, 12\\)": States("s0", torch.zeros(6, 8), good["last_hidden"]),
        "is torch.bfloat16, the target": States("s0", good["aux_hidden"].bfloat16(), good["last_hidden"]),
        "NaN": States("s0", good["aux_hidden"], good["last_hidden"] / 0),
    }
    for message, states in wrong.items():
        with pytest.raises(CaptureError, match=message):
            states.check(sequence, 4, torch.float32)


def test_a_sequence_without_tokens_or_with_a_boundary_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="give int32"):
        TokenSequence("a", np.zeros(0, np.int32), 0)
    with pytest.raises(ValueError, match="must lie within"):
        TokenSequence("a", np.zeros(3, np.int32), 4)
