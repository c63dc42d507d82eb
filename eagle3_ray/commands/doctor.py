"""Prints the state of a run directory, sets a stage's data aside, or, without RUN, examines the cluster.

Exit codes: 0 all is well or only warned of, 1 a FAIL in the cluster, 2 no such run.
"""

import argparse
import os

from ray.exceptions import RayError

from eagle3_ray import cluster, cluster_doctor, doctor
from eagle3_ray.run_log import say
from eagle3_ray.runs import CAPTURE, EVALUATE, GENERATE, TRAIN, RunDir, RunError

_NO_RAY = "Is Ray up at RAY_ADDRESS (`ray status` there), and is ~/.ray/auth_token here the cluster's?"


def main() -> int:
    """Does as the command line says and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run directory")
    parser.add_argument(
        "--quarantine",
        choices=[GENERATE, CAPTURE, TRAIN, EVALUATE],
        help="move this stage's data to RUN/quarantine; deletes nothing",
    )
    parser.add_argument("--storage", metavar="DIR", help="a folder that all nodes have to share, e.g. that of run.dir")
    parser.add_argument("--endpoints", default="", metavar="URLS", help="SGLang servers that all nodes have to reach")
    parser.add_argument("--sglang-python", metavar="COMMAND", help="the Python that has SGLang, on the nodes with GPUs")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the servers' API key")
    arguments = parser.parse_args()
    if arguments.run is None:
        if arguments.quarantine:
            parser.error("--quarantine needs RUN")
        return _examine(arguments)
    run = RunDir(arguments.run)
    try:
        if arguments.quarantine:
            print(f"moved to {run.quarantine(arguments.quarantine)}")
        else:
            print(doctor.describe(run))
    except RunError as error:
        say(f"{type(error).__name__}: {error}")
        return 2
    return 0


def _examine(arguments: argparse.Namespace) -> int:
    urls = [url.rstrip("/") for url in arguments.endpoints.split(",") if url]
    key = os.environ.get(arguments.api_key_env) if arguments.api_key_env else None
    try:
        cluster.connect()
        findings = cluster_doctor.examine(arguments.storage, urls, arguments.sglang_python, key)
    except (ConnectionError, RayError) as error:
        print(f"FAIL ray: {str(error).strip().splitlines()[0]} {_NO_RAY}")
        return 1
    print("\n".join(map(str, findings)))
    return int(any(finding.level == "FAIL" for finding in findings))
