"""ray job submit -- python jobs/generate.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
