"""What a target's config.json tells of its language model, and what SGLang calls that model's layers.

A layer is named by its Hugging Face `hidden_states` index: k is what enters layer k. SGLang counts otherwise, and not
alike in every model class; `served_ids` and `indices_of` translate, for the capture and for a drafter's config.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any

AUX_LAYERS = 3

_KEEP_IDS = ("DeepseekV2", "DeepseekV3", "KimiK25", "GlmMoeDsa", "Glm4MoeLite", "MistralLarge3")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: multimodal models such as Kimi-K2.5 nest it as `text_config`.

    `architectures` stays the whole model's, since SGLang serves that class.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or not inner.keys() & {"num_hidden_layers", "vocab_size"}:
        return dict(config)
    return {**inner, "architectures": config.get("architectures") or inner.get("architectures")}


def default_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """2, N // 2 and N - 3 of N layers, as the engines choose for EAGLE-3."""
    count = int(text_config(config)["num_hidden_layers"])
    return 2, count // 2, count - 3


def wrong_layers(config: Mapping[str, Any], layers: Sequence[int]) -> str | None:
    """Why no drafter can be trained and served on these layers; None where one can."""
    count = int(text_config(config)["num_hidden_layers"])
    if len(layers) != AUX_LAYERS or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= count:
        return (
            f"{list(layers)} of a model with {count} layers: name three different layers from 1 to {count - 1} in "
            "ascending order (HF hidden_states index: k is what enters layer k)."
        )
    if keeps_ids(config) and layers[0] == 1:
        return f"{list(layers)}: SGLang reads a list of this model that begins with 1 as one layer on; begin with 2."
    return None


def keeps_ids(config: Mapping[str, Any]) -> bool:
    """Whether SGLang takes this target's layer ids as they are, unless they begin with 1; else it adds 1 to each.

    Read in sglang 0.5.23, `set_eagle3_layers_to_capture` of sglang/srt/models, which tests/engine/test_layer_ids.py
    runs for every model class that has it.

    | family, by `architectures` of config.json                              | captured, given ids           |
    | ---------------------------------------------------------------------- | ----------------------------- |
    | DeepSeek V2 to V3.2, Kimi K2 and K2.5, GLM DSA, GLM-4 MoE Lite,        | id, but id + 1 if ids[0] == 1 |
    | Mistral Large 3                                                        |                               |
    | all others: Llama, Llama 4, Qwen 2 to 3.5, Gemma 3 and 4, GLM-4 MoE,   | id + 1                        |
    | GLM-5 Next, GPT-OSS, MiniMax, Bailing, EXAONE, LongCat, Apertus, ...   |                               |
    """
    return any(name.startswith(_KEEP_IDS) for name in text_config(config).get("architectures") or ())


def served_ids(layers: Sequence[int], keeps_ids: bool) -> list[int]:
    """What SGLang calls these layers: in its flag, and in a drafter's `eagle_aux_hidden_state_layer_ids`.

    Raises:
        ValueError: layers that no list of ids names, which `wrong_layers` tells beforehand.
    """
    if not keeps_ids:
        return [layer - 1 for layer in layers]
    if layers[0] == 1:
        raise ValueError(f"layers {list(layers)} have no ids that SGLang would not read as one layer on.")
    return list(layers)


def indices_of(ids: Sequence[int], keeps_ids: bool) -> tuple[int, ...]:
    """The layers that SGLang captures for these ids, in its order, which is that of the layers."""
    shift = 0 if keeps_ids and ids[0] != 1 else 1
    return tuple(sorted(layer + shift for layer in ids))


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """rope_theta of a config of transformers 4 or 5; None where it is not told."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return None if theta is None else float(theta)
