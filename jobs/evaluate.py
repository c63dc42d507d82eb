"""ray job submit -- python jobs/evaluate.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray import cli, evaluate

if __name__ == "__main__":
    sys.exit(cli.main(evaluate.__doc__ or "", evaluate.run, evaluate.dry_run))
