"""ray job submit -- python jobs/evaluate.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
