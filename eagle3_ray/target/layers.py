"""Which layers are captured."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_ray.model_config import default_layers, text_config, wrong_layers
from eagle3_ray.target.files import TargetError


def resolve_layers(config: Mapping[str, Any], layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """`layers`, checked, or for None the default of EAGLE-3; by HF `hidden_states` index.

    Raises:
        TargetError: the config tells no number of layers, or `wrong_layers`.
    """
    if not isinstance(text_config(config).get("num_hidden_layers"), int):
        raise TargetError("The target's config.json does not tell num_hidden_layers, so no layer can be captured.")
    chosen = default_layers(config) if layers is None else tuple(layers)
    if wrong := wrong_layers(config, chosen):
        raise TargetError(f"capture.layers={wrong}")
    return chosen
