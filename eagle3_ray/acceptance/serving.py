"""Engines to measure in: one that runs already, or one that is started for the purpose and stopped behind it."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle3_ray.sglang_cpu.processes import HOST, ServerProcess, free_port
from eagle3_ray.sglang_cpu.server import Server

PLAIN = "none"
"""The name, among drafters, of the engine without one."""
CPU = "cpu"


@dataclass(frozen=True)
class Serving:
    """How the engines come to be.

    `launch` is CPU (the SGLang of `sglang_cpu`) or the command that starts SGLang on this machine, its own arguments
    included ("python -m sglang.launch_server --tp 8"); model, drafter and port are added to it. `endpoints` are engines
    that run already, by drafter (as it was named, or PLAIN); only those that are missing there are started.
    """

    target: Path
    steps: int  # drafted tokens a verify step, in a chain
    launch: str = CPU
    endpoints: tuple[tuple[str, str], ...] = ()
    startup_timeout_s: float = 1800

    @contextmanager
    def engine(self, drafter: str) -> Iterator[str]:
        """The URL of an engine with this drafter (a folder, or PLAIN).

        Raises:
            ServerFailed: it did not start; the message has the end of its log.
        """
        running = dict(self.endpoints).get(drafter)
        if running is not None:
            yield running
            return
        folder = None if drafter == PLAIN else Path(drafter).absolute()
        with self._server(folder) as server:
            yield server.url

    def _server(self, drafter: Path | None) -> ServerProcess:
        port = free_port()
        speculation = [] if drafter is None else speculative_arguments(drafter, self.steps)
        if self.launch == CPU:
            return Server(
                self.target,
                port=port,
                drafter=drafter,
                args=speculation,
                startup_timeout_s=min(300, self.startup_timeout_s),
            )
        return ServerProcess(
            [
                *shlex.split(self.launch),
                "--model-path",
                str(self.target),
                "--host",
                HOST,
                "--port",
                str(port),
                *speculation,
            ],
            port=port,
            env=os.environ,
            log=None,
            startup_timeout_s=self.startup_timeout_s,
        )


def speculative_arguments(drafter: Path, steps: int) -> list[str]:
    """SGLang's arguments for a chain of `steps` drafts. EAGLE instead of EAGLE3 would be taken, and accept nothing."""
    return [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(drafter),
        "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(steps + 1),
    ]  # fmt: skip
