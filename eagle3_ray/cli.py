"""The command line that all jobs share: `JOB PRESET_OR_YAML [dotted.key=value ...] [--dry-run]`.

Exit codes: 0 complete, 1 not complete (the same command goes on), 2 a setup that has to be changed first.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ray
import yaml

from eagle3_ray.config import Config, keys, load, presets
from eagle3_ray.errors import explain
from eagle3_ray.mirror import mirrored, to_fetch
from eagle3_ray.run_log import say
from eagle3_ray.stages import SETUP_ERRORS, sentence

_CODES = {"complete": 0, "refused": 2}


def main(
    story: str,
    run: Callable[[Config], dict[str, Any]],
    dry_run: Callable[[Config], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the command line, runs the stage, prints its summary as the last line of stdout, returns the exit code."""
    parser = argparse.ArgumentParser(
        description=story, epilog=_help(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="PRESET_OR_YAML", help=f"{', '.join(presets())}, or a YAML file")
    parser.add_argument(
        "overrides", metavar="dotted.key=value", nargs="*", help="values over those of the preset or file"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan, then stop"
    )
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.dry_run:
        return carry_out(lambda: _run(run, load(arguments.source, arguments.overrides)))
    try:
        config = load(arguments.source, arguments.overrides)
        print(yaml.safe_dump(config.model_dump(), sort_keys=False))
        told = to_fetch(config.run.dir, config.run.mirror) if config.run.mirror else None
        print(told or dry_run(config))  # which may write a plan into run.dir
    except SETUP_ERRORS as error:
        say(f"{type(error).__name__}: {error}")
        return 2
    return 0


def _run(run: Callable[[Config], dict[str, Any]], config: Config) -> dict[str, Any]:
    if config.run.mirror is None:
        return run(config)
    return mirrored(lambda: run(config), config.run.dir, config.run.mirror)


def carry_out(work: Callable[[], dict[str, Any]]) -> int:
    """Runs a job and tells how it ended: to people on stderr, to programs on the last line of stdout, by the exit code.

    SIGTERM is an orderly end from here on. An error that nobody foresaw is told as all others and then raised.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        summary = work()
    except SETUP_ERRORS as error:
        say(f"{type(error).__name__}: {error}")
        summary = _without_summary("refused", sentence(error))
    except (SystemExit, KeyboardInterrupt) as end:
        summary = _without_summary("stopped", explain(end))
    except (OSError, ray.exceptions.RayError) as error:
        summary = _without_summary("stopped", sentence(error))
    except BaseException as error:
        _tell(_without_summary("failed", sentence(error)))
        raise
    return _tell(summary)


def _without_summary(status: str, cause: str) -> dict[str, Any]:
    return {"status": status, "stopped_by": cause, "warnings": []}


def _tell(summary: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the job is over, and its line has to come out
    ray.shutdown()  # which prints what it has to say of lost workers, so that the summary is the last line
    code = _CODES.get(summary["status"], 1)
    if summary["stopped_by"] and code == 1:
        say(f"STOPPED: {summary['stopped_by']}")
    for warning in summary["warnings"]:
        say(f"WARNING: {warning}")
    if code == 1:
        say("Run the same command again to go on from here; what is finished is kept.")
    print(json.dumps(summary), flush=True)
    return code


def _help() -> str:
    lines = ["keys:"]
    for name, field in keys():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        lines.append(f"  {name} ({default})\n      {field.description}")
    return "\n".join(lines)
