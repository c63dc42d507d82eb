"""ray job submit -- python jobs/prepare.py OUT --source NAME=PATH ... [--against EVAL ...] [--limit N] [--ngram N]"""

import sys

from eagle3_ray.commands.prepare import main

if __name__ == "__main__":
    sys.exit(main())
