"""From prompts to a measured drafter in one command.

generate -> capture (only where training reads a cache) -> train -> evaluate -> report. Each stage is the job of its own
name, with the same configuration; one that is complete has nothing to do, so the same command goes on at the first
stage that is not. A stage gives back its servers, GPUs and memory before the next one starts.
"""

import time
from typing import Any

from eagle3_ray import capture, evaluate, generate, train
from eagle3_ray.config import Config
from eagle3_ray.errors import explain
from eagle3_ray.report import write_report
from eagle3_ray.run_log import say
from eagle3_ray.runs import CAPTURE, EVALUATE, GENERATE, TRAIN, RunDir, RunError
from eagle3_ray.stages import Stage

_KEPT = ("status", "rows", "rejected", "quarantined", "tokens", "steps", "chain_acceptance_length", "wall_s")


def run(config: Config) -> dict[str, Any]:
    """Runs all stages, stops behind the first that does not complete, and returns what each came to.

    Raises:
        stages.SETUP_ERRORS: those of the stages; says what to change.
    """
    started = time.monotonic()
    run_dir = RunDir(config.run.dir)
    evaluate.questions_of(config.evaluate)  # a missing file would show behind days of training
    say(dry_run(config))
    summaries: dict[str, dict[str, Any]] = {}
    for name, stage in _stages(config):
        say(f"--- {name}")
        summaries[name] = stage(config)
        if summaries[name]["status"] != "complete":
            break
    last_name, last = next(reversed(summaries.items()))
    complete = last["status"] == "complete"
    warnings = [f"{name}: {warning}" for name, summary in summaries.items() for warning in summary["warnings"]]
    report = None
    try:
        report = str(write_report(run_dir))
    except (OSError, RunError) as error:  # the disk is full, or the first stage was stopped before it began
        warnings.append(f"report: {explain(error)}")
    return {
        "stage": "pipeline",
        "status": last["status"],
        "stopped_by": last["stopped_by"] and f"{last_name}: {last['stopped_by']}",
        "warnings": warnings,
        "stages": {name: {key: s[key] for key in _KEPT if key in s} for name, s in summaries.items()},
        "acceptance_length": last.get("acceptance_length") if complete else None,
        "best_drafter": last.get("best_drafter") if complete else None,
        "drafter_dir": summaries.get(TRAIN, {}).get("drafter_dir"),
        "launch": summaries.get(TRAIN, {}).get("launch"),
        "report": report,
        "run_dir": str(run_dir.path),
        "wall_s": round(time.monotonic() - started, 1),
    }


def dry_run(config: Config) -> str:
    """Which stages there are, which are complete, and how long those took that ran before."""
    run_dir = RunDir(config.run.dir)
    lines = [f"pipeline in {run_dir.path}"]
    for name, _ in _stages(config):
        summary = run_dir.summary(name)
        state = "to do" if summary is None else f"{summary['status']}, {summary['wall_s']:.0f} s last time"
        lines.append(f"  {name:10} {state}")
    return "\n".join(lines)


def _stages(config: Config) -> list[tuple[str, Stage]]:
    cached = [(CAPTURE, capture.run)] if config.train.feed == "cache" else []
    return [(GENERATE, generate.run), *cached, (TRAIN, train.run), (EVALUATE, evaluate.run)]
