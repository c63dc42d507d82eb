"""Published drafters: the layouts of SGLang, vLLM and SpecForge, safetensors or torch files, read into our model.

Every tensor of the file and every tensor of the model is accounted for. A server skips what it does not know and says
nothing of what it lacks; here both are errors with names. Our own exports are sealed with a hash of all tensors.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.file_hashes import sha256_of
from eagle3_ray.json_files import read_object
from eagle3_ray.torch_files import UnreadableTorchFile, load_plain, open_safetensors

SEAL, CONFIG_SEAL = "eagle3_ray.sha256", "eagle3_ray.config_sha256"
"""Keys of the safetensors metadata that hold the hashes of an exported drafter's tensors, and of its config.json."""

_AGAIN = "Fetch or export the drafter again."
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
    shapes = _shapes(config)
    read = {name: tensor for name, tensor in read_tensors(folder).items() if not name.endswith(_NOT_OURS)}
    tensors = {plain_name(name): tensor for name, tensor in read.items()}
    if len(tensors) != len(read):
        raise CheckpointError(f"{folder} holds a tensor under two names: {', '.join(sorted(read))}.")
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = _drafted(folder, tensors["d2t"], config)
    tensors.setdefault("aux_scale", torch.ones(shapes["aux_scale"]))
    problems = mismatches(shapes, tensors)
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json: {'; '.join(problems)}.")
    if not torch.equal(tensors["t2d"].bool(), _drafted(folder, tensors["d2t"], config)):
        raise CheckpointError(f"{folder}: d2t and t2d name different tokens, so one of them is stale.")
    drafter = Eagle3Drafter(config)
    expected = drafter.state_dict()
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
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json, so it is no drafter.")
    return read_object(folder / "config.json", "Fetch the drafter again.", CheckpointError)


def sealed_config(folder: Path) -> dict[str, Any]:
    """`read_config` of an exported drafter, which must not have been edited. Raises CheckpointError: it was."""
    config = read_config(folder)
    for file in folder.glob("*.safetensors"):
        with open_safetensors(file, CheckpointError, _AGAIN) as opened:
            sealed = (opened.metadata() or {}).get(CONFIG_SEAL)
        if sealed not in (None, sha256_of(folder / "config.json")):
            raise CheckpointError(f"{folder / 'config.json'} is not as it was exported: export the drafter again.")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, else of its torch files; those cannot run code (weights only).

    Raises:
        CheckpointError: there are none, or a file is damaged or was changed after its export.
    """
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt")])
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors, pytorch_model*.bin or *.pt file.")
    for file in files:
        loaded = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch_file(file)
        for name, tensor in loaded.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise CheckpointError(f"{file}: {name} is no tensor but {type(tensor).__name__}.")
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is in another file of the folder, too.")
            tensors[name] = tensor
    return tensors


def seal(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    with open_safetensors(file, CheckpointError, _AGAIN) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        sealed = (opened.metadata() or {}).get(SEAL)
    if sealed is not None and sealed != seal(tensors):
        raise CheckpointError(f"{file} is damaged (its tensors are not those that were exported): export it again.")
    return tensors


def _read_torch_file(file: Path) -> dict[Any, Any]:
    try:
        loaded = load_plain(file)
    except UnreadableTorchFile as error:
        raise CheckpointError(f"{error} Fetch the drafter again, as safetensors if there are any.") from None
    for wrapper in ("model_state_dict", "state_dict", "model"):
        if isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    return loaded


def _shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """What the drafter's tensors have to be; nothing of their size is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Eagle3Drafter(config).state_dict().items()}


def _drafted(folder: Path, d2t: Tensor, config: DrafterConfig) -> Tensor:
    """Which of the target's tokens `d2t` leads to, bool [V]."""
    if tuple(d2t.shape) != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise CheckpointError(
            f"{folder}: d2t is {d2t.dtype} {list(d2t.shape)}, not the {config.draft_vocab_size} whole numbers of "
            "config.json's draft_vocab_size."
        )
    try:
        return DraftVocabulary.inherited(d2t, config.vocab_size).t2d
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
