"""Why is the served acceptance length 1.0, or far below training's? Names a cause instead of leaving a number.

Three questions, each only asked where the one before it found nothing: does the server speculate as it should (what it
says of itself), is the exported folder in order (`folder.py`), and does the drafter work on this target's own states?
The last one is answered by replaying answers, first as the folder says and then with one thing changed at a time:
the order of the layers, a flag, the vocabulary map, RoPE, neighbouring layers. What lifts acceptance sharply is named.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_ray.acceptance.changes import Change, Evidence, Recorded, changes
from eagle3_ray.acceptance.engine import EngineInfo, Served
from eagle3_ray.acceptance.folder import Finding, inspect_folder
from eagle3_ray.acceptance.replay import replay
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.drafter.config import DrafterConfigError
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.file_hashes import folder_sha
from eagle3_ray.model_config import text_config
from eagle3_ray.target.files import TargetError, TargetFiles
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.protocol import CaptureError, TokenSequence
from eagle3_ray.target.transformers_backend import TransformersTarget

OF_THE_ENGINE = ("algorithm", "other drafter", "other chain", "serving")
"""Causes that lie in how a server was started."""

FAR_BELOW = 0.8
"""A served acceptance length under this share of the expected one is diagnosed."""
_SHARPLY = 1.25  # a change has to multiply the accepted drafts by this much to be named,
_AT_LEAST = 0.05  # to add this much to the acceptance length,
_BACK = 0.5  # and to bring back this share of the drafts that training had accepted, or this many where it is not known
_WORKS = 1.15  # without a training figure: a drafter that accepts less than this has learned nothing of this target

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
    gather = partial(_gather, target, answers, steps, trust_remote_code)
    return diagnose_folder(drafter, target.config, served, expected, gather)


def is_suspicious(served: float | None, expected: float | None) -> bool:
    """Whether an acceptance length asks for a diagnosis: none at all, exactly 1.0, or far below `expected`.

    `expected` 1.0 says that the drafter has learned nothing yet.
    """
    return served is None or (served == 1.0 and expected != 1.0) or served < FAR_BELOW * (expected or 0.0)


def check_engine(info: EngineInfo, drafter: Path, steps: int) -> list[Finding]:
    """What the server says of itself, held against what it was to do."""
    if info.algorithm != "EAGLE3":
        said = "The server decodes without a drafter."
        if info.algorithm:
            said = (
                f"The server runs --speculative-algorithm {info.algorithm}; there the drafter gets the last state in "
                "place of its three layers and the target's head in place of its own, without a warning."
            )
        return [Finding("algorithm", said, "Start it with --speculative-algorithm EAGLE3.")]
    findings = []
    if info.draft_model is not None and _is_another(Path(info.draft_model), drafter):
        findings.append(
            Finding("other drafter", f"The server serves {info.draft_model}, not {drafter}.", "Serve this one.")
        )
    if (info.steps, info.topk) != (steps, 1):
        findings.append(
            Finding(
                "other chain",
                f"The server drafts {info.steps} steps with top-k {info.topk}, the figure is for a chain of {steps}.",
                f"Start it with --speculative-num-steps {steps} --speculative-eagle-topk 1.",
            )
        )
    return findings


def _is_another(served: Path, drafter: Path) -> bool:
    """Told by the files where both folders are here, for most drafters are called `drafter`; else by the name."""
    if served.is_dir() and drafter.is_dir():
        return folder_sha(served) != folder_sha(drafter)
    return served.name != drafter.name


def diagnose_folder(
    folder: Path,
    target_config: Mapping[str, Any],
    served: float | None,
    expected: float | None,
    gather: Callable[[], Evidence | Finding],
) -> list[Finding]:
    """Names what is wrong with the drafter or its place: from its files, else by replay of a suspicious one.

    Args:
        target_config: the target's config.json (a multimodal one with its text_config inside).
        served: the acceptance length in the engine, None where nothing was served (replay is judged alone).
        expected: training's figure for the same kind of prompts, None where it is not known.
        gather: makes the evidence, or says why there is none.
    """
    try:
        findings = inspect_folder(folder, target_config)
        if findings or not is_suspicious(served, expected):
            return findings
        evidence = gather()
        if isinstance(evidence, Finding):
            return [evidence]
        return _by_replay(load_drafter(folder, evidence.target_config), evidence, served, expected)
    except (CheckpointError, DrafterConfigError) as error:
        return [Finding("files", f"{error}", "Export the drafter again and validate the folder.")]
    except (CaptureError, TargetError, OSError, ValueError, RuntimeError) as error:  # what was measured is kept
        said = f"The acceptance length is suspicious, and the target cannot replay its answers: {error}"
        return [Finding("unknown", said.splitlines()[0], "Diagnose on a machine that can load the target.")]


def _by_replay(
    drafter: Eagle3Drafter, evidence: Evidence, served: float | None, expected: float | None
) -> list[Finding]:
    recorded = evidence.at_layers(drafter.config.aux_layers)
    base = _accepts(drafter, evidence, recorded)
    if findings := _named(drafter, evidence, recorded, base, expected):
        return findings
    accepts = f"On this target's own states the drafter accepts {base:.2f} tokens a step"
    if expected is not None and base < FAR_BELOW * expected:
        said = f"{accepts}, training said {expected:.2f} of its own, and no other reading of its files helps."
        if base >= _WORKS:
            remedy = "These questions are not like those that it learned from: add such prompts and train again."
            return [Finding("other questions", said, remedy)]
        remedy = "It was trained on another target, or on other answers: train on this one's."
        return [Finding("other target", said, remedy)]
    if expected is None and base < _WORKS:
        said = f"{accepts}, and no other reading of its files helps: it has learned nothing of this target."
        return [Finding("untrained or other target", said, "Train it on this target's answers.")]
    if served is not None and served < FAR_BELOW * base:
        return [
            Finding(
                "serving",
                f"The drafter accepts {base:.2f} tokens a step when replayed on this target's states, {served:.2f} in "
                "the engine: the engine computes other states or another drafter.",
                "Compare its model path, dtype, quantisation and version with those of the capture.",
            )
        ]
    return []


def _accepts(drafter: Eagle3Drafter, evidence: Evidence, recorded: Recorded) -> float:
    return replay(drafter, evidence.embed_tokens, recorded, evidence.steps).length or 1.0


def _named(
    drafter: Eagle3Drafter, evidence: Evidence, recorded: Recorded, whole: float, expected: float | None
) -> list[Finding]:
    """The change that helps most, if it helps sharply.

    Even a drafter with random weights gains a little by a vocabulary map that is fitted to it, so it has to help much.
    """
    enough = 1 + _BACK * (1 if expected is None else expected - 1)
    best: tuple[float, float, Change] | None = None
    for change in changes(drafter, evidence, recorded):
        judged_by = change.judged_by
        base = whole if judged_by is recorded else _accepts(drafter, evidence, judged_by)
        lifted = _accepts(change.drafter, evidence, change.recorded)
        sharply = lifted - 1 >= max(_SHARPLY * (base - 1), base - 1 + _AT_LEAST)
        if sharply and lifted >= enough and (best is None or lifted > best[1]):
            best = base, lifted, change
    if best is None:
        return []
    base, lifted, change = best
    said = f"{change.what} lifts the replayed acceptance length from {base:.2f} to {lifted:.2f}."
    return [Finding(change.cause, said, change.remedy)]


def _gather(target: TargetFiles, answers: Sequence[Served], steps: int, trust_remote_code: bool) -> Evidence | Finding:
    weights = sum(path.stat().st_size for path in target.folder.glob("*.safetensors"))
    if not 0 < weights <= _LARGEST:
        why = "are not there" if weights == 0 else f"of {weights / 1e9:.0f} GB are too large"
        said = f"The acceptance length is suspicious, and the weights in {target.folder} {why} to replay answers with."
        return Finding("unknown", said, "Replay captured states of this target with acceptance.replay.")
    sequences = _sequences(answers)
    if not sequences:
        return Finding("unknown", "No answer is long enough to replay.", "Evaluate on prompts with longer answers.")
    return Evidence(
        target_config=text_config(target.config),
        embed_tokens=load_parts(target.folder, torch.float32).embed_tokens,
        at_layers=lambda layers: _record(target.folder, sequences, layers, trust_remote_code),
        steps=steps,
    )


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
