"""All that the report says, as one dictionary: report.json. The page shows nothing that is not in it.

Each stage is None before it ran. What a run holds of its own is enough: a report can be made at any moment, on any
machine that sees the run directory.
"""

import re
import time
from typing import Any

from eagle3_ray.report.data import captured, generated
from eagle3_ray.report.served import evaluated
from eagle3_ray.report.training import trained
from eagle3_ray.runs import CAPTURE, EVALUATE, GENERATE, TRAIN, RunDir, RunError

STAGES = (GENERATE, CAPTURE, TRAIN, EVALUATE)

_SECRETS = (
    (re.compile(r"(--?[\w-]*(?:api-key|token|password|secret)[ =])\S+", re.IGNORECASE), r"\1…"),
    (re.compile(r"(\w+://)[^/\s@]+@"), r"\1"),  # user and password in a URL
    (re.compile(r"\b(hf_|sk-|AKIA)\w{8,}"), r"\1…"),
)


def collect(run: RunDir) -> dict[str, Any]:
    """What is in the run, stage by stage.

    Raises:
        RunError: there is no run at that path, or its manifest is damaged.
    """
    manifest = run.manifest()
    if not manifest:
        raise RunError(f"{run.path} holds no run (no manifest.json with a stage). Start one with jobs/generate.py.")
    found: dict[str, Any] = {
        "run": run.path.resolve().name,
        "run_dir": str(run.path),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        GENERATE: generated(run),
        CAPTURE: captured(run),
        TRAIN: trained(run),
        EVALUATE: evaluated(run),
    }
    found["headline"] = _headline(found)
    streamed = found[TRAIN] is not None and found[CAPTURE] is None  # such a run has no capture stage
    due = [stage for stage in STAGES if not _complete(found[stage]) and not (streamed and stage == CAPTURE)]
    found["next"] = {stage: _next(run, manifest, stage) for stage in due}
    found["provenance"] = {stage: _provenance(entry) for stage, entry in manifest.items()}
    cleaned = without_secrets(found)
    assert isinstance(cleaned, dict)
    return cleaned


def without_secrets(value: Any) -> Any:
    """The value with keys, tokens and passwords cut out of all strings in it."""
    if isinstance(value, str):
        for pattern, kept in _SECRETS:
            value = pattern.sub(kept, value)
        return value
    if isinstance(value, dict):
        return {key: without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return value


def _headline(found: dict[str, Any]) -> dict[str, Any]:
    """The run in a handful of numbers; None where it is not known yet."""
    generate, train, evaluate = found[GENERATE] or {}, found[TRAIN] or {}, found[EVALUATE] or {}
    by_role = {drafter["role"]: drafter for drafter in evaluate.get("drafters", [])}
    speeds = {role: {one["concurrency"]: one["tokens_per_second"] for one in d["speed"]} for role, d in by_role.items()}
    alone = min(speeds.get("trained", {}), default=None)
    after = by_role.get("trained", {}).get("all") or {}
    validations = train.get("validations") or [{}]
    return {
        "acceptance_before": (by_role.get("fresh", {}).get("all") or {}).get("acceptance_length"),
        "acceptance_after": after.get("acceptance_length"),
        "chain_acceptance_first": validations[0].get("chain_acceptance_length"),
        "chain_acceptance_best": train.get("chain_acceptance_length")
        or max((check["chain_acceptance_length"] for check in validations if check), default=None),
        "speed_concurrency": alone,
        "speed_without": speeds.get("none", {}).get(alone),
        "speed_with": speeds.get("trained", {}).get(alone),
        "sequences": generate.get("rows"),
        "answer_tokens": generate.get("output_tokens"),
        "rejected": generate.get("rejected"),
    }


def _complete(stage: dict[str, Any] | None) -> bool:
    return stage is not None and stage["status"] == "complete"


def _next(run: RunDir, manifest: dict[str, Any], stage: str) -> str:
    """The command that runs the stage: its own where it began, else an earlier stage's with the other job's name."""
    for known in STAGES[: STAGES.index(stage) + 1][::-1]:
        command: str | None = manifest.get(known, {}).get("command")
        if command is not None:
            for form in ("jobs/{}.py", "eagle3-{}"):  # the pipeline's stays as it is
                command = command.replace(form.format(known), form.format(stage), 1)
            questions = "" if stage != EVALUATE or "evaluate.prompts" in command else " evaluate.prompts=QUESTIONS"
            return command + questions
    return f"python jobs/{stage}.py PRESET_OR_YAML run.dir={run.path}"


def _provenance(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("created", "starts", "last_start", "command", "versions", "fingerprint", "servers")
    return {name: entry[name] for name in names if name in entry}
