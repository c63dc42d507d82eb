"""`eagle3-prepare`, and jobs/prepare.py."""

import argparse

from eagle3_ray import cli, prepare
from eagle3_ray.instruction_sets import PUBLIC_SETS


def main() -> int:
    """Does as the command line says and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=prepare.__doc__, epilog=_help(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", help="the folder to make; prompts.path of the generate job")
    parser.add_argument(
        "--source",
        dest="sources",
        metavar="SOURCE",
        nargs="+",
        action="extend",
        required=True,
        help="NAME=PATH (a file, folder or glob of .jsonl, .jsonl.gz, .jsonl.zst, .parquet; local, s3://, gs://), "
        "NAME=hf://DATASET[:SPLIT], NAME=run://RUN (questions by the target, below), or the name of a public set "
        "(below); of two copies the one in the earlier source stays",
    )
    parser.add_argument(
        "--against",
        metavar="EVAL",
        nargs="+",
        action="extend",
        default=[],
        help="evaluation sets, as paths or hf://; a prompt that shares words with one is set aside",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many prompts in each partition")
    parser.add_argument(
        "--ngram", metavar="N", type=int, default=13, help="so many words in a row count as shared (default 13)"
    )
    arguments = parser.parse_args()
    return cli.carry_out(
        lambda: prepare.run(
            arguments.out, arguments.sources, arguments.against, limit=arguments.limit, ngram=arguments.ngram
        )
    )


def _help() -> str:
    return "\n".join(
        [
            "a row: messages (OpenAI roles), conversations (ShareGPT), prompt, instruction with input (Alpaca),",
            "  question, problem, query, or turns (MT-bench); answers in it are dropped",
            'questions by the target itself: jobs/generate.py on rows of {"target_asks": true} with',
            "  generate.samples_per_prompt=N generate.temperature=1 generate.top_p=0.9 makes RUN; cut ones stay out",
            "public sets, with the extra `pip install 'eagle3_ray[datasets]'`:",
            *(f"  {name}: {public}" for name, public in PUBLIC_SETS.items()),
            "exit codes: 0 prepared, 1 stopped (the same command starts anew), 2 something has to be changed first",
        ]
    )
