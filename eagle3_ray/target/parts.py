"""The target's embedding, output head, final norm and config, read from its files without loading the model."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3_ray.model_config import text_config
from eagle3_ray.target.files import TargetError, read_config, read_json
from eagle3_ray.target.protocol import TargetParts
from eagle3_ray.torch_files import open_safetensors

_AGAIN = "Fetch the target's weights again."
_EMBED = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "norm.weight"
_QUANTISED = re.compile(r"(^|\.)(lm_head|embed_tokens)\.(?!weight$|bias$)")  # weight_packed, qweight, weight_scale, ...
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "transformer.")
_INDEX = "model.safetensors.index.json"


def load_parts(folder: Path, dtype: torch.dtype) -> TargetParts:
    """Reads embed_tokens [V, H], lm_head [V, H] and norm [H] as `dtype` from a Hugging Face model folder.

    One safetensors file or many with an index; plain language models and those nested in a multimodal one. Tied
    embeddings give the same tensor twice.

    Raises:
        TargetError: a file or tensor is missing, or is stored quantised.
    """
    whole = read_config(folder)
    config = text_config(whole)
    where = _tensor_files(folder)
    if quantised := [name for name in sorted(where) if _QUANTISED.search(name)]:
        raise TargetError(
            f"{folder} stores its head or embedding quantised ({quantised[0]}). Give a checkpoint "
            "that leaves both as they were trained."
        )
    embed = _read(where, (_EMBED, "wte.weight"), folder, dtype)
    norm = _read(where, (_NORM, "final_layernorm.weight"), folder, dtype)
    head_stored = any(prefix + _HEAD in where for prefix in _PREFIXES)
    tied = config.get(
        "tie_word_embeddings", whole.get("tie_word_embeddings")
    )  # left out where it is a family's default
    if tied is False and not head_stored:
        raise TargetError(f"{folder} holds no {_HEAD}, and its config.json says that it is not the embedding.")
    head = _read(where, (_HEAD,), folder, dtype) if head_stored and not tied else embed
    if head.shape != embed.shape or norm.shape != embed.shape[1:]:
        raise TargetError(
            f"{folder}: embedding {tuple(embed.shape)}, head {tuple(head.shape)} and norm {tuple(norm.shape)} "
            "do not fit together."
        )
    return TargetParts(embed, head, norm, config)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index, missing={}).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise TargetError(f"{index} is damaged (it names no files of its folder). Fetch the target model again.")
        return {name: folder / file for name, file in weight_map.items()}
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path, TargetError, _AGAIN) as file:
            where |= dict.fromkeys(file.keys(), path)
    if not where:
        raise TargetError(f"{folder} holds no safetensors files. Convert or fetch the target's weights as safetensors.")
    return where


def _read(where: dict[str, Path], names: Sequence[str], folder: Path, dtype: torch.dtype) -> torch.Tensor:
    found = next((prefix + name for prefix in _PREFIXES for name in names if prefix + name in where), None)
    if found is None:
        raise TargetError(f"{folder} holds no {names[0]} under a known name; its tensors begin {sorted(where)[:3]}.")
    path = where[found]
    if not path.exists():
        raise TargetError(f"{path} is missing, which holds {found}. Fetch the target's weights.")
    with open_safetensors(path, TargetError, _AGAIN) as file:
        tensor: torch.Tensor = file.get_tensor(found)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise TargetError(
            f"{found} in {path.name} is stored as {tensor.dtype}. Give a checkpoint whose head is not quantised."
        )
    return tensor.to(dtype)
