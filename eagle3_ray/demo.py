"""`make demo`: from prompts to a measured drafter with real parts, on a CPU, in one command.

Installs a real SGLang, makes the target SmolLM2-135M, starts a Ray cluster on this machine, submits the pipeline to it
the way that any job is submitted, shows what came out, and stops all that it started. A second run is a no-op.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ray.job_submission import JobSubmissionClient

from eagle3_ray.runs import EVALUATE, RunDir
from eagle3_ray.sglang_cpu import install, model

_ROOT = Path(__file__).resolve().parents[1]
_AGENT_TRIES = 60


def main() -> int:
    """Runs the demonstration; returns the job's exit code."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run directory (default runs/demo)")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="passed on to jobs/pipeline.py")
    arguments = parser.parse_args()
    run_dir = arguments.run.absolute()
    started = time.monotonic()
    _say("1/3 a real SGLang for CPU, in an environment of its own, and the target SmolLM2-135M-Instruct")
    install()
    model()
    _say("2/3 the pipeline: generate, capture, train, evaluate")
    data = [f"prompts.path={_ROOT / 'demo' / 'prompts'}", f"evaluate.prompts={_ROOT / 'demo' / 'eval'}"]
    code = _submit([f"run.dir={run_dir}", *data, *_SMALL, *arguments.overrides])
    _say(f"3/3 what there is now, {time.monotonic() - started:.0f} s after the start")
    _tell(RunDir(run_dir))
    return code


_SMALL = [  # for minutes instead of hours
    "generate.max_new_tokens=96",
    "evaluate.max_new_tokens=48",
    "evaluate.concurrencies=[8]",
    "evaluate.speed_prompts=8",
]


def _submit(settings: list[str]) -> int:
    """Starts a Ray cluster of this machine, submits the job to it with `ray job submit` and waits for its end."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster listens on loopback only and ends with the demo
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cluster = ray.init(
        "local", include_dashboard=True, dashboard_host="127.0.0.1", logging_level="warning", log_to_driver=False
    )
    try:
        command = ["python", str(_ROOT / "jobs" / "pipeline.py"), "smollm2-cpu", *settings]
        address = f"http://{cluster.dashboard_url}"
        _say(f"    ray job submit -- {' '.join(command)}")
        _wait_for_job_agent(JobSubmissionClient(address))
        submit = ["ray", "job", "submit", "--address", address, "--log-style", "record", "--", *command]
        return subprocess.run(submit, check=False).returncode
    finally:
        ray.shutdown()


def _wait_for_job_agent(client: JobSubmissionClient) -> None:
    """A cluster takes jobs some seconds after it stands, when its agent has reported; until then it answers 500."""
    for _ in range(_AGENT_TRIES):
        try:
            client.submit_job(entrypoint="true")
            return
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            time.sleep(1)


def _tell(run_dir: RunDir) -> None:
    """The result in a few lines, from the run's own summary of its evaluation."""
    summary = run_dir.summary(EVALUATE)
    if summary is None:
        return
    for drafter, engine in summary["engines"].items():
        if "acceptance" in engine:
            same = engine["lossless"]
            _say(
                f"    {drafter}\n"
                f"      acceptance length {engine['acceptance']['all']['acceptance_length']:.3f} in the real engine, "
                f"{same['equal']} of {same['answers']} greedy answers equal to the plain engine's, "
                f"speed against it {json.dumps(engine['speedup'])}"
            )
    _say(f"    the report: {run_dir.path / 'report.html'}")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
