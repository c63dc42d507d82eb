"""ray job submit -- python jobs/pipeline.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray.commands.pipeline import main

if __name__ == "__main__":
    sys.exit(main())
