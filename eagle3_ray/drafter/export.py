"""The folder that SGLang and vLLM serve: written whole or not at all, and believed only after reading it back."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_ray.drafter.checkpoints import (
    CONFIG_SEAL,
    SEAL,
    CheckpointError,
    load_drafter,
    mismatches,
    read_config,
    read_tensors,
    seal,
    sealed_config,
)
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.file_hashes import sha256_of
from eagle3_ray.whole_files import temporary

WEIGHTS = "model.safetensors"


def export(
    drafter: Eagle3Drafter,
    folder: Path,
    target_config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    card: str | None = None,
) -> None:
    """Writes `folder` (config.json, model.safetensors, and `card` as README.md) anew, after validating it.

    A folder that is there is replaced in one rename; before that it is whole, and after it the new one is.

    Raises:
        CheckpointError: what was written does not read back as this drafter.
    """
    fresh, old = temporary(folder), temporary(folder)
    fresh.mkdir(parents=True)
    config = drafter.config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = exported_tensors(drafter, dtype)
    seals = {SEAL: seal(tensors), CONFIG_SEAL: sha256_of(fresh / "config.json")}
    save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt", **seals})
    if card is not None:
        (fresh / "README.md").write_text(card)
    for file in fresh.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    validate(fresh, target_config, drafter.config)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def exported_tensors(drafter: Eagle3Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint's tensors on the CPU: weights in `dtype`, the map as it is, `aux_scale` inside `fc.weight`."""
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] * tensors.pop("aux_scale")
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def validate(folder: Path, target_config: Mapping[str, Any], expected: DrafterConfig | None = None) -> DrafterConfig:
    """Reads `folder` as strictly as no server does: exact tensors, finite weights, a sound map, the target's RoPE.

    `expected` is what was trained; without it sizes and RoPE must be the target's. Returns the config that was read.

    Raises:
        CheckpointError: the first thing that would serve badly, by name.
    """
    raw = read_config(folder)
    drafter = load_drafter(folder, target_config)
    config, due = drafter.config, expected or DrafterConfig.from_target(target_config, draft_vocab_size=1)
    tensors = read_tensors(folder)
    shapes = {name: tuple(t.shape) for name, t in drafter.state_dict().items() if name != "aux_scale"}
    problems = mismatches(shapes, tensors)  # under the very names: the reader above also takes other layouts
    problems += [
        f"{name} holds values that are not finite"
        for name, t in tensors.items()
        if t.is_floating_point() and not bool(t.isfinite().all())
    ]
    for field in ("hidden_size", "vocab_size", "rope", "max_position_embeddings"):
        if getattr(config, field) != getattr(due, field):
            problems.append(f"{field} is {getattr(config, field)}, not {getattr(due, field)}")
    if not raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"):
        problems.append("eagle_config.eagle_aux_hidden_state_layer_ids is missing")
    if expected and config != expected:
        problems.append(f"config.json reads back as {config}, not {expected}")
    if problems:
        raise CheckpointError(f"{folder} would not serve as trained: {'; '.join(problems)}.")
    sealed_config(folder)
    return config


def launch_command(folder: Path, target: str) -> str:
    """SGLang's command for serving `target` with this drafter."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, *speculative_arguments(folder, steps=5)]
    return " ".join(words)


def speculative_arguments(drafter: Path, steps: int) -> list[str]:
    """SGLang's arguments for a chain of `steps` drafts. EAGLE instead of EAGLE3 would be taken, and accept nothing."""
    return [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(drafter),
        "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(steps + 1),
    ]  # fmt: skip
