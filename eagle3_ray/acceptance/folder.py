"""What is wrong with an exported drafter folder, read from its files alone and held against its target's config.

SGLang 0.5.23 skips tensors whose names it does not know and leaves out, without a word, those that are missing: a
folder that loads may still hold no drafter. Nothing is run here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_ray.drafter.checkpoints import CheckpointError, plain_name, read_config, read_tensors
from eagle3_ray.drafter.config import LLAMA, MLA
from eagle3_ray.model_config import rope_theta, text_config

ARCHITECTURES = (LLAMA, MLA)
_MIDLAYER = (
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
)
_LLAMA_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLA_ATTENTION = ("self_attn.kv_a_layernorm", "self_attn.kv_b_proj")


@dataclass(frozen=True)
class Finding:
    """Something that costs acceptance: its name, what was seen, and what to do about it."""

    cause: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence} {self.remedy}"


def inspect_folder(folder: Path, target_config: Mapping[str, Any]) -> list[Finding]:
    """All that can be told without running anything; empty where the files are in order.

    Args:
        target_config: the target's config.json (a multimodal one with its text_config inside).

    Raises:
        CheckpointError: no drafter folder at all: no config.json, no readable tensors, text where numbers belong.
    """
    config = read_config(folder)
    tensors = {plain_name(name): tensor for name, tensor in read_tensors(folder).items()}
    target = text_config(target_config)
    try:
        return [
            *_architecture(config),
            *_sizes(config, target),
            *_tensors(config, tensors),
            *_vocabulary_map(config, tensors, int(target["vocab_size"])),
            *_layers(config, target),
            *_rope(config, target),
            *_fc_norm(config, tensors),
        ]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = f"{folder} holds a field or tensor of a kind that no drafter has: {type(error).__name__} {error}."
        raise CheckpointError(said) from None


def _architecture(config: Mapping[str, Any]) -> list[Finding]:
    named = (config.get("architectures") or [None])[0]
    if named in ARCHITECTURES:
        return []
    return [
        Finding(
            "architecture",
            f"config.json names {named}, which is no EAGLE-3 drafter of SGLang.",
            f"Set architectures to {LLAMA}, or export again.",
        )
    ]


def _sizes(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[Finding]:
    drafter_of = {"hidden_size": config.get("target_hidden_size", config.get("hidden_size"))}
    drafter_of["vocab_size"] = config.get("vocab_size")
    differing = [
        f"{name} {value} (target {target[name]})" for name, value in drafter_of.items() if value != target[name]
    ]
    if not differing:
        return []
    return [
        Finding(
            "other target",
            f"The drafter was made for a target with {' and '.join(differing)}.",
            "Serve it with the target that it was trained on.",
        )
    ]


def _tensors(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[Finding]:
    mla = (config.get("architectures") or [None])[0] == MLA
    attention = _MLA_ATTENTION if mla else _LLAMA_ATTENTION
    needed = ["fc.weight", "norm.weight", "lm_head.weight"]
    needed += [f"midlayer.{name}.weight" for name in (*attention, *_MIDLAYER)]
    if int(config.get("draft_vocab_size") or 0) not in (0, config.get("vocab_size")):
        needed.append("d2t")
    missing = [name for name in needed if name not in tensors]
    if not missing:
        return []
    return [
        Finding(
            "missing tensor",
            f"The folder lacks {', '.join(missing)}; SGLang leaves such weights as they were allocated.",
            "Export the drafter again and validate the folder.",
        )
    ]


def _vocabulary_map(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], vocab_size: int) -> list[Finding]:
    d2t, t2d, head = tensors.get("d2t"), tensors.get("t2d"), tensors.get("lm_head.weight")
    if d2t is None:
        return []
    remedy = "d2t holds offsets (target id = i + d2t[i]), for the very rows of lm_head; export it from training's map."
    if head is not None and len(d2t) != len(head):
        return [Finding("vocabulary map", f"d2t has {len(d2t)} entries, lm_head {len(head)} rows.", remedy)]
    ids = d2t.long() + torch.arange(len(d2t))
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        return [
            Finding(
                "vocabulary map",
                f"i + d2t[i] reaches from {int(ids.min())} to {int(ids.max())}, outside the target's {vocab_size} ids.",
                remedy,
            )
        ]
    if len(ids.unique()) < len(ids):
        twice = len(ids) - len(ids.unique())
        return [Finding("vocabulary map", f"d2t leads {twice} draft tokens to ids that others have already.", remedy)]
    if t2d is not None and not (len(t2d) == vocab_size and torch.equal(t2d.nonzero().flatten(), ids.sort().values)):
        return [Finding("vocabulary map", "d2t and t2d name different sets of target tokens.", remedy)]
    return []


def _layers(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[Finding]:
    eagle = config.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    layers = int(target["num_hidden_layers"])
    if ids is None or (len(set(ids)) == len(ids) and list(ids) == sorted(ids) and min(ids) >= 0 and max(ids) < layers):
        return []
    return [
        Finding(
            "layer ids",
            f"eagle_aux_hidden_state_layer_ids is {ids}, not rising ids of the target's {layers} layers.",
            "Name the layers that training captured, in its order.",
        )
    ]


def _rope(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[Finding]:
    if rope_theta(config) is not None or rope_theta(target) in (None, 10000.0):
        return []
    return [
        Finding(
            "rope",
            f"config.json tells no rope_theta, so SGLang takes 10000; the target's is {rope_theta(target):g}.",
            "Write the RoPE fields that the drafter was trained with into config.json.",
        )
    ]


def _fc_norm(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[Finding]:
    switched_on = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    norms = sum(name.startswith("fc_norm.") for name in tensors)
    if switched_on == (norms == 3):
        return []
    return [
        Finding(
            "fc_norm",
            f"config.json says fc_norm {str(switched_on).lower()}, the folder holds {norms} of its 3 tensors.",
            "Export the drafter again: flag and tensors have to agree.",
        )
    ]
