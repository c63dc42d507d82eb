"""ray job submit -- python jobs/capture.py PRESET_OR_YAML [dotted.key=value ...]"""

import sys

from eagle3_ray.commands.capture import main

if __name__ == "__main__":
    sys.exit(main())
