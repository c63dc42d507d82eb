"""Which layers are captured, and what SGLang calls them."""

from collections.abc import Sequence
from typing import Any

from eagle3_ray.target.files import TargetError
from eagle3_ray.target.protocol import AUX_LAYERS

_KEEPS_IDS = ("DeepseekV2", "DeepseekV3", "Kimi", "GlmMoeDsa", "Glm4MoeLite", "MistralLarge3")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: multimodal models such as Kimi-K2.5 nest it as `text_config`."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "num_hidden_layers" in inner else config


def resolve_layers(config: dict[str, Any], layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """`layers`, checked, or for None the default 2, N//2, N-3 of EAGLE-3; by HF `hidden_states` index.

    Raises:
        TargetError: not three different ascending layers that a layer of the model follows.
    """
    count = int(text_config(config)["num_hidden_layers"])
    chosen = (2, count // 2, count - 3) if layers is None else tuple(layers)
    if len(chosen) != AUX_LAYERS or list(chosen) != sorted(set(chosen)) or not chosen[0] >= 1 or chosen[-1] >= count:
        raise TargetError(
            f"capture.layers={list(chosen)} of a model with {count} layers: name three different layers from 1 to "
            f"{count - 1} in ascending order (HF hidden_states index: k is what enters layer k)."
        )
    return chosen


def sglang_layer_ids(config: dict[str, Any], layers: Sequence[int]) -> list[int]:
    """What SGLang calls these layers, in its flag and in a drafter's `eagle_aux_hidden_state_layer_ids`.

    Read in sglang 0.5.23, `set_eagle3_layers_to_capture` of sglang/srt/models; k is the HF index wanted.

    | family (`architectures` of config.json)                              | SGLang captures, given ids | ids for k |
    | -------------------------------------------------------------------- | -------------------------- | --------- |
    | DeepSeek V2 to V3.2, Kimi K2, K2.5, GLM DSA, GLM-4 MoE Lite, Mistral 3 | id + 1 if ids[0] == 1,     | k, 1 not  |
    |                                                                      | else id                    | first     |
    | all others that can: Llama, Llama 4, Qwen 2 to 3.5, Gemma 3 and 4,   | id + 1                     | k - 1     |
    | GLM-4 MoE, GPT-OSS, MiniMax, Bailing, EXAONE, LongCat, Apertus       |                            |           |

    What comes back is always in the order of the layers, whatever the order of the ids.
    """
    if _keeps_ids(config):
        return [*layers[1:], layers[0]] if layers[0] == 1 else list(layers)
    return [layer - 1 for layer in layers]


def _keeps_ids(config: dict[str, Any]) -> bool:
    architectures = [*(config.get("architectures") or ()), *(text_config(config).get("architectures") or ())]
    return any(name.startswith(_KEEPS_IDS) for name in architectures)
