"""Share of a finished run's time, past the start-up of each stage, in which the engine or the compute was at work.

    python benchmarks/pipeline_efficiency.py RUN

From the summaries of the stages. A stage starts up until its first request, shard, optimiser step or measurement: the
imports, the servers, the model. Behind that, at work is: generate, from the first request to the last answer; capture,
while targets capture; train, the steps less what they wait for states; evaluate, while an engine is measured. Prints
one JSON line; the goal is 0.9.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3_ray.runs import RunDir

STAGES = ("generate", "capture", "train", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory whose stages each ran once, without an end between")
    print(json.dumps(efficiency(RunDir(parser.parse_args().run))))


def efficiency(run: RunDir) -> dict[str, Any]:
    """Per stage and in all. Exits where there is no stage, or one that did nothing in its last job."""
    summaries = {stage: run.summary(stage) for stage in STAGES}
    stages = {}
    for stage, summary in summaries.items():
        if summary is None:
            continue
        if summary["start_up_s"] is None:
            raise SystemExit(f"The last job of {stage} in {run.path} found nothing to do; measure a run that ran once.")
        past = summary["wall_s"] - summary["start_up_s"]
        stages[stage] = {"start_up_s": summary["start_up_s"], "past_s": round(past, 1), "busy_s": summary["busy_s"]}
    if not stages:
        raise SystemExit(f"{run.path} has no summary of a stage. Give the run.dir of a finished pipeline.")
    busy, past = (sum(stage[field] for stage in stages.values()) for field in ("busy_s", "past_s"))
    return {"benchmark": "pipeline_efficiency", "ratio": round(busy / past, 3), "goal": 0.9, "stages": stages}


if __name__ == "__main__":
    main()
