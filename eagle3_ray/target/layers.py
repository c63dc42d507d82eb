"""Which layers are captured, and what SGLang calls them."""

from collections.abc import Sequence
from typing import Any

from eagle3_ray.target.files import TargetError
from eagle3_ray.target.protocol import AUX_LAYERS


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
