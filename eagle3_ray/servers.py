"""An SGLang server that a job starts for itself, owned by a Ray actor on the node that has room for it.

A server that dies is started again on its port, where the clients find it when their probe passes; one that dies as
soon as it stands is given up with its own last words. When the job ends, however it ends, its servers end: with the
actor on an orderly end, with their parent's death on any other.
"""

import threading
import time
from collections.abc import Sequence

import ray

from eagle3_ray.sglang import start
from eagle3_ray.sglang.processes import HOST, ServerFailed, ServerProcess, free_port

_EARLY_S = 60.0
_MOST_EARLY_DEATHS = 3
"""A server that dies so often in a row, each time within the time above, is given up."""


class ManagedServer:
    """One server on this node; a Ray actor."""

    def __init__(self, model: str, gpus: int, launch: str, args: Sequence[str], cluster_grows: bool = False) -> None:
        """`launch` starts an SGLang on `gpus` GPUs; with none it is that of `sglang_cpu`. `args` are more arguments.

        The server listens on loopback for as long as nobody else has to reach it: there is one node and
        the cluster does not grow.
        """
        self._model, self._gpus, self._launch, self._args = model, gpus, launch, args
        several = cluster_grows or sum(node["Alive"] for node in ray.nodes()) > 1
        self._host = ray.util.get_node_ip_address() if several else HOST
        self._port = free_port()
        self._ending = threading.Event()
        self._failure: str | None = None
        self._server: ServerProcess | None = None

    def url(self) -> str:
        """Where the server answers; starts it where it was not started. Raises ServerFailed where it does not start."""
        if self._server is None:
            self._server = self._start()
            threading.Thread(target=self._keep_alive, args=[self._server], daemon=True).start()
        return self._server.url

    def stop(self) -> None:
        """Ends the server and all its processes."""
        self._ending.set()
        if self._server is not None:
            self._server.stop()

    def failure(self) -> str | None:
        """Why the server was given up; None while it lives or is being started again."""
        return self._failure

    def _start(self) -> ServerProcess:
        return start.server(self._model, self._gpus, self._launch, self._args, port=self._port, host=self._host).start()

    def _keep_alive(self, server: ServerProcess) -> None:
        early_deaths = 0
        while not self._ending.is_set():
            started = time.monotonic()
            try:
                server.wait()
            except ServerFailed as death:
                server.kill()
                if self._ending.is_set():
                    return
                early_deaths = early_deaths + 1 if time.monotonic() - started < _EARLY_S else 0
                if early_deaths == _MOST_EARLY_DEATHS:
                    self._failure = str(death)
                    return
            try:
                self._server = server = self._start()
            except ServerFailed as death:
                self._failure = str(death)
                return
