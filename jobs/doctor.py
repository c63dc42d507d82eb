"""Prints the state of a run directory, and sets a stage's data aside when asked to.

python jobs/doctor.py RUN [--quarantine STAGE]
"""

import argparse
import sys

from eagle3_ray import doctor
from eagle3_ray.ledger import STAGE
from eagle3_ray.runs import RunDir, RunError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--quarantine", choices=[STAGE], help="move this stage's data to RUN/quarantine; deletes nothing"
    )
    arguments = parser.parse_args()
    run = RunDir(arguments.run)
    try:
        if arguments.quarantine:
            print(f"moved to {run.quarantine(arguments.quarantine)}")
        else:
            print(doctor.describe(run))
    except RunError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
