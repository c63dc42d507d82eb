"""Writes RUN/report.html, which opens in any browser, and the same numbers as RUN/report.json."""

import argparse

from eagle3_ray.report import write_report
from eagle3_ray.run_log import say
from eagle3_ray.runs import RunDir, RunError


def main() -> int:
    """Does as the command line says and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    try:
        print(write_report(RunDir(parser.parse_args().run)))
    except (RunError, OSError) as error:
        say(f"{type(error).__name__}: {error}")
        return 2
    return 0
