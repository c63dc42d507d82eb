"""What a job says of its cluster's room, with lists of nodes as Ray gives them."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from eagle3_ray import cluster
from eagle3_ray.cluster import Need, require, watched
from eagle3_ray.config import ConfigError

TARGETS = Need("capture", 2, 1, 8)


def box(alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": 32.0, "GPU": 8.0}}


def test_copies_that_fit_no_node_are_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [box(), box()])
    require(TARGETS)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [box(), box(alive=False)])
    with pytest.raises(ConfigError, match=r"\(32 CPUs and 8 GPUs\) has no room for capture: 2 x \(1 CPUs, 8 GPUs\)"):
        require(TARGETS)


def test_a_job_that_waits_for_a_lost_node_says_so_once_and_says_when_it_has_room_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [box(), box()]
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    said = ""

    def wait_for(reached: Callable[[], bool]) -> None:
        nonlocal said
        deadline = time.monotonic() + 10
        while not reached():
            assert time.monotonic() < deadline
            said += capsys.readouterr().err
            time.sleep(0.001)

    with watched(TARGETS):
        nodes[1] = box(alive=False)
        wait_for(lambda: "the job waits" in said)
        nodes[1] = box()
        wait_for(lambda: "has room again" in said)
    assert said.splitlines() == [
        "The cluster (32 CPUs and 8 GPUs) has no room for capture: 2 x (1 CPUs, 8 GPUs): the job waits. "
        "Add a node, or stop it and ask for less; it goes on from here.",
        "The cluster has room again.",
    ]
