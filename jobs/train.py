"""ray job submit -- python jobs/train.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray import cli, train

if __name__ == "__main__":
    sys.exit(cli.main(train.__doc__ or "", train.run, train.dry_run))
