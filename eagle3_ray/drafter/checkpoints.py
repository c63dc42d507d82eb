"""Published drafters: the layouts of SGLang, vLLM and SpecForge, safetensors or torch files, read into our model.

Every tensor of the file and every tensor of the model is accounted for. A server skips what it does not know and says
nothing of what it lacks; here both are errors with names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.vocabulary import DraftVocabulary

_PREFIXES = ("draft_model.", "module.", "model.")  # SpecForge's training states, DDP, vLLM's nesting
_RENAMED = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_NOT_OURS = ("embed_tokens.weight", "rotary_emb.inv_freq", "target_lm_head.weight")
"""The target's embedding and head, which the drafter shares, and a buffer that follows from the config."""


class CheckpointError(ValueError):
    """A drafter's files cannot be used; the message names the tensor or field."""


def load_drafter(folder: Path, target_config: Mapping[str, Any]) -> Eagle3Drafter:
    """The drafter in `folder`, in float32, with its vocabulary map.

    Raises:
        CheckpointError: files are missing or damaged, or a tensor is unknown, missing or of another shape.
        DrafterConfigError: the config describes no drafter that we train.
    """
    config = DrafterConfig.from_json(read_config(folder), target_config)
    drafter = Eagle3Drafter(config)
    tensors = {plain_name(name): tensor for name, tensor in read_tensors(folder).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_NOT_OURS)}
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "d2t" in tensors:
        try:
            vocabulary = DraftVocabulary.inherited(tensors["d2t"], config.vocab_size)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), vocabulary.t2d):
            raise CheckpointError(f"{folder}: d2t and t2d name different tokens, so one of them is stale.")
        tensors["d2t"], tensors["t2d"] = vocabulary.d2t, vocabulary.t2d
    expected = drafter.state_dict()
    tensors.setdefault("aux_scale", expected["aux_scale"])
    problems = mismatches({name: tuple(tensor.shape) for name, tensor in expected.items()}, tensors)
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json: {'; '.join(problems)}.")
    drafter.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()})
    return drafter


def mismatches(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unknown or of another shape, one phrase each."""
    problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"{name} {list(tensor.shape)} is unknown")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
    return problems


def plain_name(name: str) -> str:
    """The exported name of a published checkpoint's tensor."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is no drafter.") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} is damaged ({error}): fetch the drafter again.") from None
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, else of its torch files; those cannot run code (weights only)."""
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt")])
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors, pytorch_model*.bin or *.pt file.")
    for file in files:
        if file.suffix == ".safetensors":
            loaded = load_file(file)
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            for wrapper in ("model_state_dict", "state_dict", "model"):
                if isinstance(loaded.get(wrapper), dict):
                    loaded = loaded[wrapper]
        for name, tensor in loaded.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{file}: {name} is no tensor but {type(tensor).__name__}.")
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is in another file of the folder, too.")
            tensors[name] = tensor
    return tensors
