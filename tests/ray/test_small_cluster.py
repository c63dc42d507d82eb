"""A cluster with hardly any CPUs: the job takes longer, and ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY

SCRIPT = """
import sys
from pathlib import Path
import ray
from tests.jobs import Jobs, assert_sound, fake_server, settings, write_prompts

target, scratch, cpus = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
context = ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
jobs, run = Jobs(context.address_info["gcs_address"], ""), scratch / "run"
prompts = write_prompts(scratch / "p.jsonl", 90)
with fake_server(target) as server:
    for limit in (40, 90):
        result = jobs.run(*settings(run, target, prompts, server.url), f"prompts.limit={limit}")
        assert result.code == 0, result.stderr
        assert result.summary["rows"] + result.summary["rejected"] == limit
assert_sound(run)
"""


@pytest.mark.parametrize("cpus", [1])
def test_a_resumed_job_ends_on_a_cluster_of_few_cpus(cpus: int, target: Path, tmp_path: Path) -> None:
    """Ray 2.60's own filter of committed rows takes all CPUs of such a cluster, and the job never goes on."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", SCRIPT, str(target), str(tmp_path), str(cpus)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=240)
