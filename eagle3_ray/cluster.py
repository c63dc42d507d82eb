"""How a job joins its Ray cluster, and whether the cluster has room for what the job asks of it."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.data import DataContext
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle3_ray.background import repeated
from eagle3_ray.config import ConfigError
from eagle3_ray.run_log import say

_LOOK_EVERY_S = 10.0


def connect() -> None:
    """Joins the cluster that the job was submitted to, or starts a local one, and makes SIGTERM an orderly end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if ray.is_initialized():  # a later stage of the same job
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token" if "RAY_ADDRESS" in os.environ else "disabled")
    os.environ.setdefault(
        "RAY_BACKEND_LOG_LEVEL", "fatal"
    )  # this process only: Ray 2.60 calls every actor pool an error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors reach us as exceptions
    address = os.environ.get("RAY_ADDRESS")
    alone = {} if address else {"include_dashboard": False}  # its processes would take CPU from a local engine
    ray.init(address or "local", logging_level="warning", log_to_driver=False, **alone)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # behind ray.init, which sets its own
    DataContext.get_current().enable_progress_bars = False


def beside_the_driver(actor: Any, *arguments: Any, **options: Any) -> Any:
    """Starts an actor that hardly costs anything and ends with the job, or by ray.kill: no other node's loss takes it,
    and Ray restarts it. `options` are more of Ray's.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    remote = ray.remote(actor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here, **options)
    return remote.remote(*arguments)


def nodes_that_reach(urls: Sequence[str]) -> list[dict[str, Any]]:
    """The living nodes, as ray.nodes() lists them; where a URL is of this machine's loopback, this one alone."""
    living = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    return [node for node in living if node["NodeID"] == here] if _of_loopback(urls) else living


def label_of_those_that_reach(urls: Sequence[str]) -> dict[str, str] | None:
    """A label of Ray's that keeps actors on the nodes of `nodes_that_reach`, whichever come later."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if _of_loopback(urls) else None


def _of_loopback(urls: Sequence[str]) -> bool:
    return any(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in urls)


@dataclass(frozen=True)
class Need:
    """Actors that have to run at once, each on one node."""

    what: str
    copies: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.what}: {self.copies} x ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


def require(*needs: Need) -> None:
    """Makes sure that the cluster has room for all of `needs` together.

    Raises:
        ConfigError: some would wait for ever.
    """
    if lack := _lacking(needs):
        raise ConfigError(f"{lack}, each on one node. Ask for less in the configuration or add a node.")


@contextmanager
def watched(*needs: Need) -> Iterator[None]:
    """Says so when nodes are lost and the others have no room for all of `needs`: Ray waits for it without a word."""
    before = None

    def look() -> None:
        nonlocal before
        lack = _lacking(needs)
        if lack != before:
            waits = f"{lack}: the job waits. Add a node, or stop it and ask for less; it goes on from here."
            say(waits if lack else "The cluster has room again.")
        before = lack

    with repeated(look, _LOOK_EVERY_S, "room"):
        yield


def _lacking(needs: Sequence[Need]) -> str | None:
    """What living nodes have no room for, for people; None where all of it fits."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = [[node.get("GPU", 0.0), node.get("CPU", 0.0)] for node in nodes]
    for need in sorted(needs, key=lambda need: (need.gpus, need.cpus), reverse=True):
        for _ in range(need.copies):
            place = next((node for node in free if node[0] >= need.gpus and node[1] >= need.cpus), None)
            if place is None:
                have = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
                return f"The cluster ({have}) has no room for {'; '.join(map(str, needs))}"
            place[0] -= need.gpus
            place[1] -= need.cpus
    return None
