# mypy: allow-untyped-decorators
"""The drafter at both ends of a training: what it begins from, and what is served in the end."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3_ray import plan
from eagle3_ray.checkpoints import Checkpoint
from eagle3_ray.corpus import Corpus
from eagle3_ray.drafter.checkpoints import load_drafter, sealed_config
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import export, launch_command
from eagle3_ray.drafter.initialise import initialise, set_aux_scale
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.model_config import text_config
from eagle3_ray.runs import GENERATE, RunDir
from eagle3_ray.target.files import TargetFiles
from eagle3_ray.target.protocol import TargetParts


def new_config(
    target_config: Mapping[str, Any], layers: Sequence[int], draft_vocab_size: int, fc_norm: bool, norm_output: bool
) -> DrafterConfig:
    """The sizes of a drafter from scratch. A vocabulary smaller than the drafter's is taken whole."""
    size = min(draft_vocab_size, int(text_config(target_config)["vocab_size"]))
    return DrafterConfig.from_target(target_config, layers, size, fc_norm, norm_output)


def choose_vocabulary(
    run_dir: RunDir, sequences: Corpus, rows: Sequence[int], config: DrafterConfig, target: TargetFiles
) -> DraftVocabulary:
    """The tokens most frequent in the answers that train; stop, boundary and special tokens are always in."""
    counts = torch.from_numpy(sequences.answer_counts(rows, config.vocab_size))
    known = plan.load(run_dir.stage(GENERATE) / "plan")
    boundary = run_dir.manifest()[GENERATE].get("config", {}).get("audit", {}).get("boundary_ids", [])
    always = {*target.stop_ids(), *boundary, *(known[0].tokens.special_ids if known else ())}
    return DraftVocabulary.from_counts(
        counts, config.draft_vocab_size, {token for token in always if token < config.vocab_size}
    )


def from_scratch(
    config: DrafterConfig, vocabulary: DraftVocabulary, parts: TargetParts, aux_sample: torch.Tensor, seed: int
) -> Eagle3Drafter:
    """A new drafter, near the target's own last layers. `aux_sample` are some thousand aux states [n, 3H]."""
    drafter = Eagle3Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    initialise(drafter, vocabulary, parts.lm_head.float(), parts.norm.float(), aux_sample.float(), generator)
    return drafter


@torch.no_grad()
def from_checkpoint(folder: Path, target_config: Mapping[str, Any], aux_sample: torch.Tensor) -> Eagle3Drafter:
    """A published drafter, its vocabulary inherited; `fc` is scaled for training and computes what it did."""
    drafter = load_drafter(folder, target_config)
    drafter.fc.weight.mul_(drafter.aux_scale)
    set_aux_scale(drafter, aux_sample)
    drafter.fc.weight.div_(drafter.aux_scale)
    return drafter


def export_best(
    folder: Path, initial: Path, found: Checkpoint, target: TargetFiles, about: Mapping[str, Any], dtype: torch.dtype
) -> str:
    """Writes the checkpoint's drafter as the folder that engines load, and returns the command that serves it."""
    drafter = Eagle3Drafter(DrafterConfig.from_json(sealed_config(initial), target.config))
    state = {name.removeprefix("drafter."): tensor for name, tensor in found.load()["model"].items()}
    drafter.load_state_dict(state)
    launch = launch_command(folder, target.name)
    export(drafter, folder, target.config, dtype, _card(target, about, launch))
    return launch


def _card(target: TargetFiles, about: Mapping[str, Any], launch: str) -> str:
    facts = json.dumps(about, indent=1)
    return (
        f"# EAGLE-3 drafter for {target.name}\n\nTrained with eagle3_ray. Serve it with\n\n```\n{launch}\n```\n\n"
        f"What it was trained on, and how it did on held-out sequences:\n\n```json\n{facts}\n```\n"
    )
