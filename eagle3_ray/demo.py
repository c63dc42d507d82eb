"""`make demo`: prompts to exact token sequences with real parts, on a CPU, in one command.

Installs and starts a real SGLang with SmolLM2-135M, starts a Ray cluster on this machine, submits the generate job to
it the way that any job is submitted, shows what came out, and stops all that it started. A second run is a no-op.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from eagle3_ray import doctor
from eagle3_ray.runs import RunDir
from eagle3_ray.sglang_cpu import Server, install, model

_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs the demonstration; returns the job's exit code."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run directory (default runs/demo)")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="passed on to jobs/generate.py")
    arguments = parser.parse_args()
    run_dir = arguments.run.absolute()
    started = time.monotonic()
    _say("1/4 a real SGLang for CPU, in an environment of its own")
    install()
    _say("2/4 the target: SmolLM2-135M-Instruct")
    folder = model()
    settings = [f"run.dir={run_dir}", f"prompts.path={_ROOT / 'demo' / 'prompts'}", "generate.max_new_tokens=96"]
    if RunDir(run_dir).succeeded("generate"):
        _say(f"3/4 {run_dir} is complete already: the job has nothing to do and needs no server")
        code = _submit([*settings, *arguments.overrides])
    else:
        _say("3/4 SGLang starts (about half a minute)")
        with Server(folder) as server:
            code = _submit([*settings, f"generate.endpoints={server.url}", *arguments.overrides])
    if not RunDir(run_dir).manifest():
        return code
    _say(f"4/4 what there is now, {time.monotonic() - started:.0f} s after the start")
    print(doctor.describe(RunDir(run_dir)))
    return code


def _submit(settings: list[str]) -> int:
    """Starts a Ray cluster of this machine, submits the job to it with `ray job submit` and waits for its end."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster listens on loopback only and ends with the demo
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cluster = ray.init(
        "local", include_dashboard=True, dashboard_host="127.0.0.1", logging_level="warning", log_to_driver=False
    )
    try:
        command = ["python", str(_ROOT / "jobs" / "generate.py"), "smollm2-cpu", *settings]
        address = f"http://{cluster.dashboard_url}"
        _say(f"    ray job submit -- {' '.join(command)}")
        submit = ["ray", "job", "submit", "--address", address, "--log-style", "record", "--", *command]
        return subprocess.run(submit, check=False).returncode
    finally:
        ray.shutdown()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
