"""A cluster of several nodes on this machine, in a process of its own: nodes come, and die as if their plug was pulled.

    with Nodes() as nodes:
        node = nodes.add(num_gpus=8)
        ... nodes.jobs.start(...); nodes.remove(node); nodes.gpus() ...

The GPUs are numbers; whatever stands behind them is started by `target.launch` (tests/fakes/launch.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.jobs import REPOSITORY, Jobs, tiny_options


class Nodes:
    """The cluster; it ends with the block, or with this process."""

    def __init__(self, head_cpus: int = 4) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="e3", ignore_cleanup_errors=True)  # short: sockets lie in it
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self._folder.name}
        environment.pop("RAY_ADDRESS", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodes", str(head_cpus)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.jobs = Jobs(self._answer(), "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

    def add(self, **resources: float) -> int:
        """A node of so many num_cpus and num_gpus; returns its number."""
        return int(self._ask("add", resources))

    def remove(self, node: int) -> None:
        """Kills all processes of the node at once."""
        self._ask("remove", node)

    def actors(self, class_name: str) -> list[int]:
        """The process ids of all living actors of a class."""
        return list(self._ask("actors", class_name))

    def gpus(self) -> tuple[float, float]:
        """Free GPUs and all GPUs."""
        free, all_ = self._ask("gpus", None)
        return free, all_

    def metrics_ports(self) -> list[int]:
        """Where Prometheus finds the metrics of each node."""
        return list(self._ask("metrics", None))

    def wait_for_free_gpus(self, within_s: float = 60) -> None:
        """Returns when nobody holds a GPU."""
        deadline = time.monotonic() + within_s
        while (found := self.gpus())[0] != found[1]:
            assert time.monotonic() < deadline, f"{found[0]} of {found[1]} GPUs are free"
            time.sleep(0.2)

    def _ask(self, what: str, about: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, about]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the simulated cluster ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)


def launch(folder: Path, target: Path, **options: Any) -> str:
    """The value of `target.launch` for stand-in servers; their options and their request logs lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.json").write_text(json.dumps({**tiny_options(target), **options}))
    return f"{sys.executable} {REPOSITORY / 'tests/fakes/launch.py'} --folder {folder}"


def requests_at(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The requests for rows that each server of `launch` has answered, by its process id."""
    found = {}
    for path in folder.glob("*.log"):
        text = path.read_text()
        entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        answered = [entry for entry in entries if entry["outcome"] == "answered"]
        found[path.stem] = [entry for entry in answered if not entry["rid"].startswith("probe")]
    return found


def servers_of(folder: Path) -> list[int]:
    """The process ids of the servers of `launch` that live."""
    return [int(path.stem) for path in folder.glob("*.log") if psutil.pid_exists(int(path.stem))]


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is for the log
    node = {"object_store_memory": 150 << 20}
    patience = {"health_check_timeout_ms": 60_000}  # a busy node is slow and not dead; a killed one is noticed
    head = {**node, "num_cpus": int(sys.argv[1]), "include_dashboard": False, "_system_config": patience}
    cluster = Cluster(True, True, {**head, "dashboard_agent_listen_port": None})  # the default may be another cluster's
    nodes: dict[int, Any] = {}

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    answer(cluster.address)
    for line in sys.stdin:
        what, about = json.loads(line)
        if what == "add":
            nodes[len(nodes)] = cluster.add_node(**{**node, "num_cpus": 2, **about})
            answer(len(nodes) - 1)
        elif what == "remove":
            cluster.remove_node(nodes[about], allow_graceful=False)
            answer(None)
        elif what == "actors":
            found = ray._private.state.actors().values()
            answer([a["Pid"] for a in found if a["ActorClassName"] == about and a["State"] == "ALIVE"])
        elif what == "metrics":
            answer([node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]])
        else:
            answer([resources().get("GPU", 0.0) for resources in (ray.available_resources, ray.cluster_resources)])
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
