"""ray job submit -- python jobs/evaluate.py --target MODEL --prompts PATH[,PATH] DRAFTER [DRAFTER ...]"""

import argparse
import json
import sys

from eagle3_ray.evaluate import STAGE, EvaluateSettings, evaluate
from eagle3_ray.prompts import PromptSourceError
from eagle3_ray.target.files import TargetError


def main() -> int:
    """Prints the summary as the last line of stdout; 0 is complete, 1 stopped early, 2 a setup to change first."""
    defaults = EvaluateSettings("", (), ())
    parser = argparse.ArgumentParser(prog=f"jobs/{STAGE}.py", description="Measures drafters in the engine.")
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="exported folder")
    parser.add_argument("--target", required=True, help="folder or Hugging Face name of the target model")
    parser.add_argument("--prompts", required=True, help="files, folders or globs, separated by commas")
    parser.add_argument("--limit", type=int, help="most rows of each file")
    parser.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens)
    parser.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="drafts a verify step")
    parser.add_argument("--concurrencies", default=",".join(map(str, defaults.concurrencies)))
    parser.add_argument("--expected", type=float, help="acceptance length that training found")
    parser.add_argument("--launch", default=defaults.launch, help='"cpu", or the command that starts SGLang')
    parser.add_argument(
        "--endpoint", action="append", default=[], metavar="DRAFTER=URL", help="engine that runs already"
    )
    parser.add_argument("--out", help="JSON file for the result")
    given = parser.parse_args()
    try:
        summary = evaluate(
            EvaluateSettings(
                target=given.target,
                drafters=tuple(given.drafters),
                prompts=tuple(given.prompts.split(",")),
                limit=given.limit,
                max_new_tokens=given.max_new_tokens,
                temperature=given.temperature,
                steps=given.steps,
                concurrencies=tuple(int(c) for c in given.concurrencies.split(",")),
                expected=given.expected,
                launch=given.launch,
                endpoints=tuple((name, url) for name, _, url in (e.rpartition("=") for e in given.endpoint)),
                out=given.out,
            )
        )
    except (PromptSourceError, TargetError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for warning in summary["warnings"]:
        print(f"WARNING: {warning}", file=sys.stderr)
    print(json.dumps(summary), flush=True)
    return 0 if summary["status"] == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
