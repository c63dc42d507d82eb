"""python jobs/report.py RUN"""

import sys

from eagle3_ray.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
