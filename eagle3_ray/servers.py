"""SGLang servers that a job starts for itself, each owned by a Ray actor on the node that has room for it.

A server that dies is started again on its port, where the clients find it when their probe passes; one that dies as
soon as it stands is given up with its own last words. When the job ends, however it ends, its servers end: with the
actor on an orderly end, with their parent's death on any other.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from eagle3_ray import cluster
from eagle3_ray.config import Config
from eagle3_ray.sglang.gpu_server import gpu_server
from eagle3_ray.sglang_cpu import Server
from eagle3_ray.sglang_cpu.processes import HOST, ServerFailed, ServerProcess, free_port
from eagle3_ray.target.files import TargetFiles

_EARLY_S = 60.0
_MOST_EARLY_DEATHS = 3
"""A server that dies so often in a row, each time within the time above, is given up."""


class ManagedServer:
    """One server on this node; a Ray actor. Raises ServerFailed where it does not start."""

    def __init__(self, model: str, gpus: int, launch: str, args: Sequence[str]) -> None:
        self._model, self._gpus, self._launch, self._args = model, gpus, launch, args
        self._port = free_port()
        several = sum(node["Alive"] for node in ray.nodes()) > 1
        self._host = ray.util.get_node_ip_address() if several else HOST  # loopback unless somebody has to reach it
        self._ending = threading.Event()
        self._failure: str | None = None
        self._server = self._start()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def url(self) -> str:
        """Where the server answers."""
        return self._server.url

    def stop(self) -> None:
        """Ends the server and all its processes."""
        self._ending.set()
        self._server.stop()

    def failure(self) -> str | None:
        """Why the server was given up; None while it lives or is being started again."""
        return self._failure

    def _start(self) -> ServerProcess:
        return _server(self._model, self._gpus, self._launch, self._args, self._port, self._host).start()

    def _keep_alive(self) -> None:
        early_deaths = 0
        while not self._ending.is_set():
            started = time.monotonic()
            try:
                self._server.wait()
            except ServerFailed as death:
                self._server.kill()
                if self._ending.is_set():
                    return
                early_deaths = early_deaths + 1 if time.monotonic() - started < _EARLY_S else 0
                if early_deaths == _MOST_EARLY_DEATHS:
                    self._failure = str(death)
                    return
            try:
                self._server = self._start()
            except ServerFailed as death:
                self._failure = str(death)
                return


def _server(model: str, gpus: int, launch: str, args: Sequence[str], port: int, host: str) -> ServerProcess:
    if gpus == 0:
        return Server(Path(model), port=port, args=args)
    return gpu_server(launch, model, gpus, args, port=port, host=host)


@contextmanager
def endpoints(config: Config, target: TargetFiles) -> Iterator[list[str]]:
    """The servers to generate with: those that are named, else as many as were asked for, started here.

    Raises:
        ServerFailed: one did not start; the message has the end of its log.
        ConfigError: the cluster has no room for them.
    """
    generate = config.generate
    if generate.endpoints or not generate.servers:
        yield generate.endpoints
        return
    cpus = 1.0 if generate.gpus_per_server else 0.5  # a server on a CPU takes what is idle
    cluster.require(cluster.Need("servers", generate.servers, cpus, generate.gpus_per_server))
    actor = ray.remote(ManagedServer).options(num_cpus=cpus, num_gpus=generate.gpus_per_server, max_concurrency=4)
    print(f"starting {generate.servers} SGLang server(s); a large model takes minutes", file=sys.stderr)
    model = target.name if target.fingerprint()["target.weights"] is None else str(target.folder)
    servers = [
        actor.remote(
            model, generate.gpus_per_server, config.target.launch, [*config.target.server_args, *generate.server_args]
        )
        for _ in range(generate.servers)
    ]
    try:
        yield ray.get([server.url.remote() for server in servers])
    finally:
        for server in servers:
            with suppress(ray.exceptions.RayError):  # it ended by itself, and its server with it
                if failure := ray.get(server.failure.remote(), timeout=30):
                    print(failure, file=sys.stderr)
                ray.get(server.stop.remote(), timeout=30)
            ray.kill(server)
