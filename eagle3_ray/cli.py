"""The command line that all jobs share: `JOB PRESET_OR_YAML [dotted.key=value ...] [--dry-run]`.

Exit codes: 0 complete, 1 not complete (the same command goes on), 2 a setup that has to be changed first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ray
import yaml

from eagle3_ray.config import Config, ConfigError, keys, load, presets
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.runs import RunError
from eagle3_ray.sglang.probe import Unfit
from eagle3_ray.sglang_cpu.processes import ServerFailed
from eagle3_ray.target.files import TargetError

SETUP_ERRORS = (ConfigError, PromptSourceError, RunError, ServerFailed, TargetError, Unfit)


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
    try:
        config = load(arguments.source, arguments.overrides)
        if arguments.dry_run:
            print(yaml.safe_dump(config.model_dump(), sort_keys=False))
            print(dry_run(config))
            return 0
        summary = run(config)
        ray.shutdown()  # which prints what it has to say of lost workers, so that the summary is the last line
    except SETUP_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if summary["stopped_by"]:
        print(f"STOPPED: {summary['stopped_by']}", file=sys.stderr)
    for warning in summary["warnings"]:
        print(f"WARNING: {warning}", file=sys.stderr)
    if summary["status"] != "complete":
        print("Run the same command again to go on from here; what is finished is kept.", file=sys.stderr)
    print(json.dumps(summary), flush=True)
    return 0 if summary["status"] == "complete" else 1


def _help() -> str:
    lines = ["keys:"]
    for name, field in keys():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        lines.append(f"  {name} ({default})\n      {field.description}")
    return "\n".join(lines)
