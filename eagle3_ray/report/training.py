"""The training of a run as curves: what `steps.jsonl` says, thinned to a few hundred points."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_ray.report.data import state_of
from eagle3_ray.runs import TRAIN, RunDir, read_json
from eagle3_ray.train_log import LOG, read_log

_POINTS = 300


def trained(run: RunDir) -> dict[str, Any] | None:
    """The train stage: its summary, curves by step, validations and what the drafter is. None before it ran."""
    entry = run.manifest().get(TRAIN)
    if entry is None:
        return None
    summary = run.summary(TRAIN) or {}
    log = read_log(run.stage(TRAIN) / LOG)
    steps = [line for line in log if "loss" in line]
    names = ("steps", "expected", "tokens", "set_aside", "tokens_per_second", "wait_share", "wall_s", "launch")
    settings = entry.get("config", {}).get("train", {})
    return {
        "status": state_of(run, TRAIN),
        **{name: summary.get(name) for name in names},
        "chain_acceptance_length": summary.get("chain_acceptance_length"),
        "drafter_dir": summary.get("drafter_dir"),
        "drafter": _drafter(summary.get("drafter_dir")),
        "layers": entry["fingerprint"].get("capture.layers"),
        "ttt_steps": settings.get("ttt_steps"),
        "epochs": settings.get("epochs"),
        "curves": _curves(steps) if steps else None,
        "validations": [_validation(line) for line in log if "validation" in line],
        "warnings": list(summary.get("warnings", [])),
        "stopped_by": summary.get("stopped_by"),
    }


def _curves(steps: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Means over equal runs of steps; `step_accuracies` holds a list per TTT step, None where it was not played."""
    groups = [steps[part[0] : part[-1] + 1] for part in np.array_split(range(len(steps)), min(_POINTS, len(steps)))]
    depth = max(len(line.get("step_accuracies", [])) for line in steps)
    return {
        "step": [group[-1]["step"] for group in groups],
        "loss": [_mean([line["loss"] for line in group]) for group in groups],
        "step_accuracies": [
            [
                _mean([line["step_accuracies"][k] for line in group if len(line["step_accuracies"]) > k])
                for group in groups
            ]
            for k in range(depth)
        ],
        "tokens_per_second": [_mean([line["tokens_per_second"] for line in group]) for group in groups],
        "wait_share": [_mean([line["wait_share"] for line in group]) for group in groups],
        "learning_rate": [group[-1]["learning_rate"] for group in groups],
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _validation(line: dict[str, Any]) -> dict[str, Any]:
    numbers = line["validation"]
    return {
        "step": line["step"],
        "loss": numbers["loss"],
        "chain_acceptance_length": numbers["chain_acceptance_length"],
        "partitions": numbers.get("partitions", {}),
    }


def _drafter(folder: str | None) -> dict[str, Any] | None:
    """What the exported drafter is, from its own config.json; None where it is not (or no longer) there."""
    path = Path(folder or "") / "config.json"
    if not folder or not path.exists():
        return None
    config = read_json(path, "Export the drafter again.")
    names = ("architectures", "draft_vocab_size", "vocab_size", "hidden_size", "intermediate_size", "torch_dtype")
    weights = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
    return {**{name: config[name] for name in names if name in config}, "bytes": weights}
