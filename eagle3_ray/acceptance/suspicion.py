"""From a served figure that cannot be believed to named causes: gathers the evidence that `diagnosis.py` judges."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from eagle3_ray.acceptance.changes import Evidence, Recorded
from eagle3_ray.acceptance.diagnosis import check_engine, diagnose_folder, is_suspicious
from eagle3_ray.acceptance.engine import EngineInfo, Served
from eagle3_ray.acceptance.folder import Finding, inspect_folder
from eagle3_ray.drafter.checkpoints import CheckpointError
from eagle3_ray.model_config import text_config
from eagle3_ray.target.files import TargetFiles
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.protocol import TokenSequence
from eagle3_ray.target.transformers_backend import TransformersTarget

_ANSWERS = 12  # that are replayed, a dozen times over: some seconds each time on a CPU
_SHORTEST, _LONGEST = 8, 96  # answer tokens: shorter ones say little, of longer ones the beginning is enough
_LARGEST = 60e9  # bytes of weights that this process loads; a larger target is not replayed here


def examine(
    info: EngineInfo,
    drafter: Path,
    served: float | None,
    expected: float | None,
    target: TargetFiles,
    answers: Sequence[Served],
    steps: int,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Why the served acceptance length is what it is; empty where nothing is wrong with it.

    What the server says of itself and what the folder's files say is always looked at. Only a suspicious figure is
    followed up by a replay of the plain engine's `answers`, for which the target's weights have to be on this machine.
    """
    findings = check_engine(info, drafter, steps)
    if findings or not drafter.is_dir():
        return findings
    findings = _of_files(drafter, target)
    if findings or not is_suspicious(served, expected):
        return findings
    weights = sum(path.stat().st_size for path in target.folder.glob("*.safetensors"))
    if not 0 < weights <= _LARGEST:
        why = "are not there" if weights == 0 else f"of {weights / 1e9:.0f} GB are too large"
        said = (
            f"The acceptance length is {served}, and the weights in {target.folder} {why} to replay the answers with."
        )
        return [Finding("unknown", said, "Replay captured states of this target with acceptance.replay.")]
    sequences = _sequences(answers)
    if not sequences:
        return [Finding("unknown", "No answer is long enough to replay.", "Evaluate on prompts with longer answers.")]
    evidence = Evidence(
        target_config=text_config(target.config),
        embed_tokens=load_parts(target.folder, torch.float32).embed_tokens,
        at_layers=lambda layers: _record(target.folder, sequences, layers, trust_remote_code),
        steps=steps,
    )
    return diagnose_folder(drafter, evidence, served, expected)


def _of_files(drafter: Path, target: TargetFiles) -> list[Finding]:
    try:
        return inspect_folder(drafter, target.config)
    except CheckpointError as error:
        return [Finding("files", f"{error}", "Export the drafter again and validate the folder.")]


def _sequences(answers: Sequence[Served]) -> list[TokenSequence]:
    """Answers from all over the prompt set."""
    long = [one for one in answers if len(one.output_ids) >= _SHORTEST]
    chosen = long[:: max(1, len(long) // _ANSWERS)][:_ANSWERS]
    return [
        TokenSequence(
            one.prompt.name,
            np.array([*one.prompt.prompt_ids, *one.output_ids[:_LONGEST]], dtype=np.int32),
            len(one.prompt.prompt_ids),
        )
        for one in chosen
    ]


def _record(
    folder: Path, sequences: Sequence[TokenSequence], layers: tuple[int, ...], trust_remote_code: bool
) -> Recorded:
    target = TransformersTarget(folder, layers, "float32", trust_remote_code=trust_remote_code)
    try:
        return list(zip(sequences, target.capture(sequences), strict=True))
    finally:
        target.close()
