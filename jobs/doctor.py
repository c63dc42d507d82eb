"""python jobs/doctor.py RUN [--quarantine STAGE], or python jobs/doctor.py [--storage DIR] [--endpoints URL,URL]"""

import sys

from eagle3_ray.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
