"""Export, strict validation, and the layouts that a warm start reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_ray.drafter import export as export_module
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import export, launch_command, validate
from eagle3_ray.drafter.initialise import initialise
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.propose import propose
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.file_hashes import folder_sha

LLAMA_TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "vocab_size": 40,
}
MLA_TARGET: dict[str, Any] = {
    "text_config": LLAMA_TARGET
    | {
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rope_parameters": None,
    }
}


def drafter_of(target: dict[str, Any], **switches: bool) -> Eagle3Drafter:
    drafter = Eagle3Drafter(DrafterConfig.from_target(target, draft_vocab_size=10, **switches))
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(50, 48, generator=generator) * torch.logspace(-2, 2, 48)
    vocabulary = DraftVocabulary.from_counts(torch.arange(40).flip(0) % 17, 10)
    head = torch.randn(40, 16, generator=generator)
    initialise(drafter, vocabulary, head, torch.ones(16), sample, generator)
    return drafter


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "drafter.pt"])
def test_every_file_that_a_drafter_is_read_from_is_part_of_its_hash(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"before")
    before = folder_sha(tmp_path)
    (tmp_path / name).write_bytes(b"behind")
    assert folder_sha(tmp_path) != before


@pytest.mark.parametrize("target", [LLAMA_TARGET, MLA_TARGET], ids=["llama", "mla"])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["3", "3.1"])
def test_an_exported_drafter_drafts_as_the_trained_one(
    tmp_path: Path, target: dict[str, Any], switches: dict[str, bool]
) -> None:
    drafter = drafter_of(target, **switches)
    assert not torch.equal(drafter.aux_scale, torch.ones(48))
    export(drafter, tmp_path / "drafter", target, torch.float32)
    served = load_drafter(tmp_path / "drafter", target)
    assert served.config == drafter.config
    assert torch.equal(served.aux_scale, torch.ones(48))  # folded into fc
    generator = torch.Generator().manual_seed(1)
    embed, aux = torch.randn(40, 16, generator=generator), torch.randn(7, 48, generator=generator)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    ours, theirs = propose(drafter, embed, aux, ids, 4), propose(served, embed, aux, ids, 4)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1])


def test_the_exported_names_are_those_that_sglang_loads(tmp_path: Path) -> None:
    export(drafter_of(LLAMA_TARGET, fc_norm=True), tmp_path / "drafter", LLAMA_TARGET)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (16, 48),
        "fc_norm.0.weight": (16,),
        "fc_norm.1.weight": (16,),
        "fc_norm.2.weight": (16,),
        attention + "q_proj.weight": (16, 32),
        attention + "k_proj.weight": (8, 32),
        attention + "v_proj.weight": (8, 32),
        attention + "o_proj.weight": (16, 16),
        mlp + "gate_proj.weight": (24, 16),
        mlp + "up_proj.weight": (24, 16),
        mlp + "down_proj.weight": (16, 24),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (10, 16),
        "d2t": (10,),
        "t2d": (40,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("prefix", "layer"),
    [("", "midlayer."), ("", "layers.0."), ("draft_model.", "midlayer."), ("model.", "layers.0.")],
    ids=["sglang", "vllm", "specforge", "nested"],
)
def test_every_published_layout_warm_starts(tmp_path: Path, prefix: str, layer: str, file: str) -> None:
    drafter = drafter_of(LLAMA_TARGET)
    export(drafter, tmp_path / "ours", LLAMA_TARGET, torch.float32)
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors = {prefix + name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}
    tensors[prefix + "embed_tokens.weight"] = torch.zeros(40, 16)  # the target's, which many files repeat
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "ours" / "config.json").read_text())
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    loaded = load_drafter(folder, LLAMA_TARGET)
    torch.testing.assert_close(loaded.fc.weight, drafter.fc.weight * drafter.aux_scale)
    assert torch.equal(loaded.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(loaded.d2t, drafter.d2t)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"norm.weight \[16\] is missing"),
        (lambda t: t.update({"midlayer.extra": torch.ones(2)}), r"midlayer.extra \[2\] is unknown"),
        (lambda t: t.update({"fc.weight": torch.ones(16, 47)}), r"fc.weight is \[16, 47\], not \[16, 48\]"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "d2t and t2d name different tokens"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(16)}), "holds a tensor under two names"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "d2t is torch.float32"),
        (lambda t: t.update({"d2t": torch.full_like(t["d2t"], 2**62)}), "target ids must rise within"),
        (
            lambda t: t.update({"norm.weight": torch.full((16,), torch.nan)}),
            "norm.weight holds values that are not finite",
        ),
    ],
    ids=["missing", "unknown", "shape", "map", "twice", "map of fractions", "map that overflows", "nan"],
)
def test_a_folder_that_would_serve_badly_is_refused_by_tensor(tmp_path: Path, damage: Any, message: str) -> None:
    export(drafter_of(LLAMA_TARGET), tmp_path / "drafter", LLAMA_TARGET)
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        validate(tmp_path / "drafter", LLAMA_TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 10000.0, "rope_parameters": None}, "rope is"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "eagle_aux_hidden_state_layer_ids is missing"),
        ({"norm_output": True}, "config.json reads back as"),
    ],
)
def test_a_config_that_lost_a_field_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    drafter = drafter_of(LLAMA_TARGET)
    export(drafter, tmp_path / "drafter", LLAMA_TARGET)
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        validate(tmp_path / "drafter", LLAMA_TARGET, drafter.config)


def test_weights_that_changed_after_the_export_are_refused_even_where_every_shape_fits(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    export(drafter_of(LLAMA_TARGET), folder, LLAMA_TARGET)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="its tensors are not those that were exported"):
        load_drafter(folder, LLAMA_TARGET)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_a_size_that_no_memory_holds_is_refused_before_anything_is_allocated(tmp_path: Path, field: str) -> None:
    folder = tmp_path / "drafter"
    export(drafter_of(LLAMA_TARGET), folder, LLAMA_TARGET)
    config = json.loads((folder / "config.json").read_text())
    for size, said in (
        (10**12, f"{field} {10**12} must be"),
        (1 << 22, "does not fit its config.json"),
        ("x", "cannot"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {field: size}))
        with pytest.raises(ValueError, match=said):
            load_drafter(folder, LLAMA_TARGET)


def test_a_failed_export_leaves_the_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(drafter_of(LLAMA_TARGET), tmp_path / "drafter", LLAMA_TARGET, card="first")

    def refuse(*_: object) -> None:
        raise CheckpointError("no")

    monkeypatch.setattr(export_module, "validate", refuse)
    with pytest.raises(CheckpointError):
        export(drafter_of(LLAMA_TARGET), tmp_path / "drafter", LLAMA_TARGET, card="second")
    assert (tmp_path / "drafter" / "README.md").read_text() == "first"


def test_an_export_replaces_the_drafter_before_it_and_leaves_nothing_else(tmp_path: Path) -> None:
    for card in ("first", "second"):
        export(drafter_of(LLAMA_TARGET), tmp_path / "drafter", LLAMA_TARGET, card=card)
    assert (tmp_path / "drafter" / "README.md").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_switch_that_sglang_does_not_serve_is_refused(tmp_path: Path) -> None:
    export(drafter_of(LLAMA_TARGET), tmp_path / "drafter", LLAMA_TARGET)
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_before_residual": True}))
    with pytest.raises(ValueError, match="norm_before_residual True"):
        load_drafter(tmp_path / "drafter", LLAMA_TARGET)


def test_the_launch_command_names_eagle3() -> None:
    assert "--speculative-algorithm EAGLE3 " in launch_command(Path("runs/a/drafter"), "target")
    assert launch_command(Path("d"), "t").endswith("--speculative-num-draft-tokens 6")


def test_a_drafter_of_another_vocabulary_size_is_not_initialised() -> None:
    drafter = drafter_of(LLAMA_TARGET)
    other = DraftVocabulary.from_counts(torch.arange(40), 11)
    with pytest.raises(ValueError, match="the map is 11 of 40 tokens, the drafter's 10 of 40"):
        initialise(drafter, other, torch.ones(40, 16), torch.ones(16), torch.ones(5, 48), torch.Generator())


def test_a_config_with_other_layers_names_them_to_sglang_one_lower_and_to_vllm_as_they_are() -> None:
    config = DrafterConfig.from_target(LLAMA_TARGET, aux_layers=(1, 4, 9), draft_vocab_size=10)
    assert config.to_json()["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 8]
    assert config.to_json()["eagle_aux_hidden_state_layer_ids"] == [1, 4, 9]
    assert DrafterConfig.from_json(config.to_json(), LLAMA_TARGET) == config
    of_vllm = config.to_json() | {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [9, 1, 4]}
    assert DrafterConfig.from_json(of_vllm, LLAMA_TARGET) == config
    assert replace(config, aux_layers=(2, 6, 9)) == DrafterConfig.from_target(LLAMA_TARGET, draft_vocab_size=10)
