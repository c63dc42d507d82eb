"""Where the servers of a generate job have to stand."""

from collections import Counter
from typing import Any

import pytest

from eagle3_ray.config import ConfigError, load
from eagle3_ray.crew import places


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As ray.nodes() lists it."""
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_a_number_of_servers_stands_wherever_there_is_room() -> None:
    assert places(3, 8, [node("a", CPU=4, GPU=8)]) == Counter({None: 3})
    assert places(0, 0, []) == Counter()


def test_auto_takes_all_gpus_of_the_nodes_that_live() -> None:
    nodes = [
        node("head", CPU=16),
        node("a", CPU=64, GPU=8),
        node("b", CPU=64, GPU=7),
        node("c", alive=False, CPU=64, GPU=8),
    ]
    assert +places("auto", 8, nodes) == Counter({"a": 1})
    assert +places("auto", 4, nodes) == Counter({"a": 2, "b": 1})
    assert +places("auto", 1, nodes) == Counter({"a": 8, "b": 7})


def test_auto_leaves_gpus_that_no_cpu_is_there_to_serve_and_a_cpu_for_the_job_itself() -> None:
    assert +places("auto", 1, [node("a", CPU=3, GPU=8)]) == Counter({"a": 2})
    assert +places("auto", 1, [node("a", CPU=3, GPU=8), node("b", CPU=2, GPU=8)]) == Counter({"a": 2, "b": 2})
    assert +places("auto", 1, [node("a", CPU=1, GPU=8)]) == Counter()


def test_auto_without_gpus_is_one_server_a_node_that_has_a_cpu_to_give() -> None:
    nodes = [node("head", CPU=0), node("a", CPU=64), node("b", CPU=0.5), node("c", GPU=8)]
    assert +places("auto", 0, nodes) == Counter({"a": 1, "b": 1})


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("3", 3), ("0", 0)])
def test_servers_are_a_number_or_auto(word: str, value: Any) -> None:
    words = ["target.model=m", "prompts.path=p", "run.dir=/r"]
    assert load("smollm2-cpu", [*words, f"generate.servers={word}"]).generate.servers == value


@pytest.mark.parametrize("word", ["-1", "many", "1.5"])
def test_any_other_count_of_servers_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^generate\.servers=.*has to be a number of servers, or auto"):
        load("smollm2-cpu", [f"generate.servers={word}"])
