"""Why is the served acceptance length 1.0, or far below training's? Names a cause instead of leaving a number.

Three questions, each only asked where the one before it found nothing: does the server speculate as it should (what it
says of itself), is the exported folder in order (`folder.py`), and does the drafter work on this target's own states?
The last one is answered by replaying answers, first as the folder says and then with one thing changed at a time:
the order of the layers, a flag, the vocabulary map, RoPE, neighbouring layers. What lifts acceptance sharply is named.
"""

from pathlib import Path

from eagle3_ray.acceptance.changes import Change, Evidence, Recorded, changes
from eagle3_ray.acceptance.engine import EngineInfo
from eagle3_ray.acceptance.folder import Finding, inspect_folder
from eagle3_ray.acceptance.replay import replay
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.drafter.config import DrafterConfigError
from eagle3_ray.drafter.model import Eagle3Drafter

FAR_BELOW = 0.8
"""A served acceptance length under this share of the expected one is diagnosed."""
_SHARPLY = 1.25  # a change has to multiply the accepted drafts by this much to be named,
_AT_LEAST = 0.05  # to add this much to the acceptance length,
_BACK = 0.5  # and to bring back this share of the drafts that training had accepted, or this many where it is not known
_WORKS = 1.15  # without a training figure: a drafter that accepts less than this has learned nothing of this target


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
    if info.draft_model is not None and Path(info.draft_model).name != drafter.name:
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


def diagnose_folder(folder: Path, evidence: Evidence, served: float | None, expected: float | None) -> list[Finding]:
    """Names what is wrong with the drafter or its place: from its files, else by replay.

    Args:
        served: the acceptance length in the engine, None where nothing was served (replay is judged alone).
        expected: training's figure for the same kind of prompts, None where it is not known.
    """
    try:
        if findings := inspect_folder(folder, evidence.target_config):
            return findings
        drafter = load_drafter(folder, evidence.target_config)
    except (CheckpointError, DrafterConfigError) as error:
        return [Finding("files", f"{error}", "Export the drafter again and validate the folder.")]
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
    return replay(drafter, evidence.embed_tokens, recorded, evidence.steps).walked.length or 1.0


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
