"""How a job joins its Ray cluster, and whether the cluster has room for what the job asks of it."""

import logging
import os
import signal
import sys

import ray
from ray.data import DataContext

from eagle3_ray.config import ConfigError


def connect() -> None:
    """Joins the cluster that the job was submitted to, or starts a local one, and makes SIGTERM an orderly end."""
    os.environ.setdefault("RAY_AUTH_MODE", "token" if "RAY_ADDRESS" in os.environ else "disabled")
    os.environ.setdefault(
        "RAY_BACKEND_LOG_LEVEL", "fatal"
    )  # this process only: Ray 2.60 calls every actor pool an error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors reach us as exceptions
    ray.init(os.environ.get("RAY_ADDRESS", "local"), logging_level="warning", log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # behind ray.init, which sets its own
    DataContext.get_current().enable_progress_bars = False


def require(what: str, copies: int, cpus: float, gpus: float) -> None:
    """Makes sure that `copies` actors of that many CPUs and GPUs can run at once, each on one node.

    Raises:
        ConfigError: they would wait for ever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_fits(node, cpus, gpus) for node in nodes)
    if room < copies:
        have = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ConfigError(
            f"{what} needs {copies} x ({cpus:g} CPUs, {gpus:g} GPUs), each on one node; the cluster has {have}, which "
            f"is room for {room}. Ask for less or add a node."
        )


def _fits(node: dict[str, float], cpus: float, gpus: float) -> int:
    shares = [node.get(name, 0) // need for name, need in (("CPU", cpus), ("GPU", gpus)) if need > 0]
    return int(min(shares, default=1))
