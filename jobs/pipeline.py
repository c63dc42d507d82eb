"""ray job submit -- python jobs/pipeline.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray import cli, pipeline

if __name__ == "__main__":
    sys.exit(cli.main(pipeline.__doc__ or "", pipeline.run, pipeline.dry_run))
