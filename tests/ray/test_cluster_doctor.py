"""The cluster's doctor on two simulated nodes, the way that an operator runs it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs import REPOSITORY

SCRIPT = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
command = [sys.executable, "jobs/doctor.py", "--storage", sys.argv[1], "--endpoints", "http://127.0.0.1:9"]
done = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}, stdout=subprocess.PIPE, text=True)
print(done.stdout)
cluster.shutdown()
sys.exit(done.returncode)
"""


def test_the_doctor_looks_at_every_node_and_fails_for_a_cluster_without_tokens(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("RAY_ADDRESS", None)
    storage = tmp_path / "shared"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(storage)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout
    assert sum(": eagle3_ray 0.1.0+" in line and line.startswith("OK") for line in lines) == 2
    assert sum("its clock is" in line and line.startswith("OK") for line in lines) == 2
    assert any(line.startswith("FAIL auth: no token") for line in lines)
    assert "OK   ports: all 2 nodes reach each other on a new port." in lines
    assert any(line.startswith(f"OK   storage: {storage} is one place for all nodes") for line in lines)
    assert sum(line.startswith("FAIL http://127.0.0.1:9: ") for line in lines) == 2
    assert list(storage.iterdir()) == [], "the doctor leaves nothing behind"
