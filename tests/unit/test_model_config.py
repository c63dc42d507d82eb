"""What SGLang calls a target's layers: one answer for the capture, for the drafter's config.json and back."""

from collections.abc import Mapping
from typing import Any

import pytest

from eagle3_ray.drafter.config import DrafterConfig, DrafterConfigError
from eagle3_ray.model_config import indices_of, keeps_ids, rope_theta, served_ids, text_config
from eagle3_ray.target.files import TargetError
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.sglang_server import capture_arguments

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 61,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


def target(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **fields}


def nested(outer: str, inner: str | None, **fields: Any) -> dict[str, Any]:
    return {"architectures": [outer], "text_config": {"architectures": inner and [inner], **SIZES, **fields}}


SHIFTED = {
    "llama": target("LlamaForCausalLM"),
    "qwen3": target("Qwen3ForCausalLM"),
    "qwen3 moe": target("Qwen3MoeForCausalLM"),
    "qwen3.5": nested("Qwen3_5MoeForConditionalGeneration", None),
    "gemma 3": nested("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "llama 4": nested("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    "glm-4 moe": target("Glm4MoeForCausalLM"),
    "gpt-oss": target("GptOssForCausalLM"),
    "minimax": target("MiniMaxM2ForCausalLM"),
    "longcat, with latent attention": target("LongcatFlashForCausalLM", **LATENT),
    "glm-5 next, with latent attention": nested("Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM", **LATENT),
}
KEPT = {
    "deepseek v2": target("DeepseekV2ForCausalLM", **LATENT),
    "deepseek v3": target("DeepseekV3ForCausalLM", **LATENT),
    "deepseek v3.2": target("DeepseekV32ForCausalLM", **LATENT),
    "kimi k2": target("DeepseekV3ForCausalLM", model_type="kimi_k2", **LATENT),
    "kimi k2.5": nested("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", **LATENT),
    "kimi k2.5, unnamed inside": nested("KimiK25ForConditionalGeneration", None, **LATENT),
    "glm dsa": target("GlmMoeDsaForCausalLM", **LATENT),
    "glm-4 moe lite": target("Glm4MoeLiteForCausalLM", **LATENT),
    "mistral large 3": target("MistralLarge3ForCausalLM", **LATENT),
}
LAYERS = [(2, 30, 58), (3, 15, 60), (2, 3, 4)]


def asked_of_the_engine(config: Mapping[str, Any], layers: tuple[int, ...]) -> list[int]:
    words = capture_arguments(config, layers)
    first = words.index("--return-aux-hidden-state-layer-ids") + 1
    return [int(word) for word in words[first : first + 3]]


def exported(config: Mapping[str, Any], layers: tuple[int, ...]) -> list[int]:
    written = DrafterConfig.from_target(config, layers, draft_vocab_size=10).to_json()
    ids: list[int] = written["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return ids


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", [*SHIFTED, *KEPT])
def test_a_drafter_names_the_layers_that_were_captured_for_it(family: str, layers: tuple[int, ...]) -> None:
    config = (SHIFTED | KEPT)[family]
    ids = list(layers) if family in KEPT else [layer - 1 for layer in layers]
    assert asked_of_the_engine(config, layers) == ids
    assert exported(config, layers) == ids
    assert exported(text_config(config), layers) == ids  # training has only the language model's part at hand
    written = DrafterConfig.from_target(config, layers, draft_vocab_size=10)
    assert DrafterConfig.from_json(written.to_json(), config) == written
    assert DrafterConfig.from_json(written.to_json(), text_config(config)).aux_layers == layers


@pytest.mark.parametrize("family", KEPT)
def test_the_first_layer_is_refused_before_a_capture_where_no_drafter_could_name_it(family: str) -> None:
    config = KEPT[family]
    with pytest.raises(TargetError, match=r"capture\.layers=\[1, 30, 58\]: SGLang reads a list .* one layer on"):
        resolve_layers(config, (1, 30, 58))
    with pytest.raises(DrafterConfigError, match=r"aux_layers \[1, 30, 58\]: SGLang reads a list"):
        DrafterConfig.from_target(config, (1, 30, 58))
    with pytest.raises(ValueError, match="no ids"):
        served_ids((1, 30, 58), keeps_ids=True)


@pytest.mark.parametrize("family", SHIFTED)
def test_the_first_layer_has_an_id_where_sglang_adds_one(family: str) -> None:
    assert resolve_layers(SHIFTED[family], (1, 30, 58)) == (1, 30, 58)
    assert exported(SHIFTED[family], (1, 30, 58)) == asked_of_the_engine(SHIFTED[family], (1, 30, 58)) == [0, 29, 57]


def test_published_ids_are_read_as_sglang_reads_them() -> None:
    assert indices_of([1, 29, 57], keeps_ids=True) == (2, 30, 58)
    assert indices_of([2, 30, 58], keeps_ids=True) == (2, 30, 58)
    assert indices_of([30, 58, 1], keeps_ids=True) == (1, 30, 58)  # SGLang gives the states in the order of the layers
    assert indices_of([1, 29, 57], keeps_ids=False) == (2, 30, 58)


def test_a_config_without_a_language_model_inside_is_its_own() -> None:
    assert text_config(SIZES) == SIZES
    assert text_config(SIZES | {"text_config": None}) == SIZES | {"text_config": None}
    assert not keeps_ids(SIZES)
    inside = text_config(KEPT["kimi k2.5"])
    assert inside["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert text_config(inside) == inside


def test_rope_theta_is_found_in_either_generation() -> None:
    assert rope_theta({"rope_theta": 500000}) == 500000.0
    assert rope_theta({"rope_parameters": {"rope_theta": 1e6}}) == 1e6
    assert rope_theta({"rope_parameters": {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {}}}) == 2e6
    assert rope_theta({}) is None
