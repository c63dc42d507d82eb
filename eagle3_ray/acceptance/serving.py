"""Engines to measure in: one that runs already, or one that is started for the purpose and stopped behind it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from eagle3_ray.acceptance.tally import PLAIN
from eagle3_ray.drafter.export import speculative_arguments
from eagle3_ray.servers import ManagedServer
from eagle3_ray.sglang_cpu.server import Server


@dataclass(frozen=True)
class Serving:
    """How the engines come to be.

    With `gpus`, `launch` starts SGLang on a node of the Ray cluster that has as many; without, it is the SGLang of
    `sglang_cpu` on this machine. `endpoints` are engines that run already, by drafter (as it was named, or PLAIN);
    only those that are missing there are started.
    """

    target: str  # folder, or the name that SGLang finds the model by
    steps: int  # drafted tokens a verify step, in a chain
    launch: str = ""
    gpus: int = 0
    endpoints: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()  # more of SGLang's arguments

    @contextmanager
    def engine(self, drafter: str) -> Iterator[str]:
        """The URL of an engine with this drafter (a folder that its node sees, or PLAIN).

        Raises:
            ServerFailed, RayError: it did not start; the message has the end of its log.
        """
        running = dict(self.endpoints).get(drafter)
        if running is not None:
            yield running
        elif self.gpus:
            with self._on_gpus(self.arguments(drafter)) as url:
                yield url
        else:
            with Server(Path(self.target), args=self.arguments(drafter)) as server:
                yield server.url

    def arguments(self, drafter: str) -> list[str]:
        """SGLang's arguments for an engine with this drafter, or for PLAIN without one."""
        if drafter == PLAIN:
            return list(self.args)
        return [*self.args, *speculative_arguments(Path(drafter).absolute(), self.steps)]

    @contextmanager
    def _on_gpus(self, args: list[str]) -> Iterator[str]:
        actor = ray.remote(ManagedServer).options(num_cpus=1, num_gpus=self.gpus, max_concurrency=4)
        server = actor.remote(self.target, self.gpus, self.launch, args)
        try:
            yield ray.get(server.url.remote())
        finally:
            with suppress(ray.exceptions.RayError):  # it ended by itself, and its server with it
                ray.get(server.stop.remote(), timeout=60)
            ray.kill(server)
