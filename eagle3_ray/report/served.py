"""What drafters were worth in the engine: the summary of the evaluate stage, in the shape of the page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_ray.acceptance.tally import EVERYTHING, PLAIN, WITHOUT_LOOPS
from eagle3_ray.file_hashes import folder_sha
from eagle3_ray.report.data import state_of
from eagle3_ray.runs import DRAFTER, EVALUATE, INITIAL, TRAIN, RunDir

_NAMES = {
    "none": "no drafter",
    "earlier": "an earlier drafter",
    "fresh": "before training",
    "trained": "after training",
}
_MISMATCHES = 5  # shown of each drafter


def evaluated(run: RunDir) -> dict[str, Any] | None:
    """The evaluate stage: each drafter's acceptance, speed, lossless check and diagnosis. None before it ran.

    A drafter's `role` is `trained` (this run's), `fresh` (what this run's training began from), `baseline` (any other)
    or `none`: the engine without a drafter. `earlier` is what lay in this run's place then, and has been replaced.
    """
    summary = run.summary(EVALUATE)
    if summary is None:
        return None
    engines = summary.get("engines", {})
    drafters = [_drafter(run, name, engine) for name, engine in engines.items()]
    order = ("none", "earlier", "fresh", "baseline", "trained")
    settings = summary.get("settings", {})
    names = ("prompts", "limit", "max_new_tokens", "steps", "speed_prompts")
    return {
        "status": state_of(run, EVALUATE),
        "settings": {name: settings.get(name) for name in names},
        "engine": next((engine["engine"] for engine in engines.values()), None),
        "drafters": sorted(drafters, key=lambda drafter: order.index(drafter["role"])),
        "concurrencies": sorted({one["concurrency"] for drafter in drafters for one in drafter["speed"]}),
        "datasets": sorted({name for drafter in drafters for name in drafter["datasets"]}),
        "warnings": list(summary.get("warnings", [])),
        "stopped_by": summary.get("stopped_by"),
    }


def _drafter(run: RunDir, name: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    groups = engine.get("acceptance", {})
    named = set(groups) - {EVERYTHING, WITHOUT_LOOPS}
    lossless = engine.get("lossless")
    role = _role(run, name, engine.get("folder_sha"))
    return {
        "name": _NAMES.get(role, Path(name).name),
        "role": role,
        "folder": None if role == "none" else name,
        "all": groups.get(EVERYTHING),
        "without_loops": groups.get(WITHOUT_LOOPS),
        "datasets": {group: counts for group, counts in groups.items() if group in named and "/" not in group},
        "categories": {group: counts for group, counts in groups.items() if group in named and "/" in group},
        "speed": [{"concurrency": int(n), "tokens_per_second": speed} for n, speed in engine.get("speed", {}).items()],
        "speedup": engine.get("speedup", {}),
        "answers": engine.get("answers"),
        "output_tokens": engine.get("output_tokens"),
        "lossless": lossless and {**lossless, "mismatches": lossless["mismatches"][:_MISMATCHES]},
        "diagnosis": engine.get("diagnosis", []),
    }


def _role(run: RunDir, name: str, sha: str | None) -> str:
    if name == PLAIN:
        return "none"
    folder = Path(name).resolve()
    known = {run.stage(TRAIN) / DRAFTER: "trained", run.stage(TRAIN) / INITIAL: "fresh"}
    role = next((role for place, role in known.items() if place.resolve() == folder), "baseline")
    if role == "baseline" or sha is None or (folder.is_dir() and folder_sha(folder) == sha):
        return role
    return "earlier"
