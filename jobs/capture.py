"""ray job submit -- python jobs/capture.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray import capture, cli

if __name__ == "__main__":
    sys.exit(cli.main(capture.__doc__ or "", capture.run, capture.dry_run))
