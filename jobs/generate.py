"""ray job submit -- python jobs/generate.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray import cli, generate

if __name__ == "__main__":
    sys.exit(cli.main(generate.__doc__ or "", generate.run, generate.dry_run))
