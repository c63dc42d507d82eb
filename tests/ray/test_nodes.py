"""Servers that a job starts for itself on a cluster of several nodes, as nodes come and go."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Jobs, assert_sound, fake_server, row_requests, rows, settings, wait_until, write_prompts
from tests.nodes import Nodes, launch, requests_at, servers_of

IN_FLIGHT = 9
"""Requests that a stand-in server which runs 8 at once is given."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as cluster:
        yield cluster


def words(run: Path, target: Path, prompts: Path, folder: Path, **options: float) -> list[str]:
    """The overrides of a job that starts one stand-in server for each 8 GPUs."""
    command = launch(folder, target, **{"base_latency_s": 0.4, "max_running": 8, **options})
    own = [f"target.launch={command}", "generate.servers=auto", "generate.gpus_per_server=8"]
    return [word for word in settings(run, target, prompts) if "endpoints" not in word] + own


def busy(folder: Path, answers: int = 10) -> int:
    """Servers that have given so many answers."""
    return sum(len(entries) >= answers for entries in requests_at(folder).values())


def test_a_node_that_joins_serves_and_one_that_is_lost_costs_what_was_in_flight(
    nodes: Nodes, target: Path, tmp_path: Path
) -> None:
    """The registry dies too, before it has to tell anybody of the new server."""
    run, folder = tmp_path / "run", tmp_path / "servers"
    first = nodes.add(num_gpus=8)
    job = nodes.jobs.start(*words(run, target, write_prompts(tmp_path / "p.jsonl", 600), folder))
    wait_until(lambda: busy(folder) == 1, job, within_s=200)
    [registry] = nodes.actors("Registry")
    os.kill(registry, signal.SIGKILL)
    second = nodes.add(num_gpus=8)
    wait_until(lambda: busy(folder) == 2, job, within_s=200)
    nodes.remove(first)
    _, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr
    assert len(rows(run, "sequences")) + len(rows(run, "rejected")) == 600
    assert_sound(run)
    answered = sum(map(len, requests_at(folder).values()))
    assert answered <= 600 + 3 * IN_FLIGHT  # both servers' requests, where the node had the generating actor as well
    nodes.wait_for_free_gpus()
    assert servers_of(folder) == []
    nodes.remove(second)


def test_a_crash_loop_ends_the_job_with_the_servers_own_words(nodes: Nodes, target: Path, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "servers"
    node = nodes.add(num_gpus=8)
    job = nodes.jobs.start(*words(run, target, write_prompts(tmp_path / "p.jsonl", 3000), folder))
    seen: set[int] = set()
    for _ in range(3):
        wait_until(lambda: set(servers_of(folder)) - seen != set() and busy(folder, 1) > len(seen), job, within_s=200)
        [server] = set(servers_of(folder)) - seen
        os.kill(server, signal.SIGKILL)
        seen.add(server)
    stdout, stderr = job.communicate(timeout=120)
    assert job.returncode == 1, stderr
    assert "No server is left. The server ended, killed by SIGKILL" in stdout.splitlines()[-1]
    nodes.wait_for_free_gpus()
    assert servers_of(folder) == []
    nodes.remove(node)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            "generate.server_args=--no-such-argument",
            [
                "ServerFailed: The server ended while starting, with exit code 2",
                "unrecognized arguments: --no-such-argument",
            ],
        ),
        (
            "target.launch=python -m 'sglang.launch_server",  # not even a command
            ["ServerFailed: ", "No closing quotation"],
        ),
        (
            "target.launch=/no/such/program",
            ["ServerFailed: The server ended while starting, with exit code 1", "/no/such/program: No such file"],
        ),
    ],
)
def test_a_server_that_never_starts_ends_the_job_before_the_first_row(
    nodes: Nodes, target: Path, tmp_path: Path, broken: str, said: list[str]
) -> None:
    node = nodes.add(num_gpus=8)
    usual = words(tmp_path / "run", target, write_prompts(tmp_path / "p.jsonl", 3), tmp_path / "servers")
    result = nodes.jobs.run(*usual, broken)
    assert result.code == 2, result.stderr
    for sentence in said:
        assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    nodes.wait_for_free_gpus()
    nodes.remove(node)


def test_a_cluster_without_room_for_one_server_is_told_so(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    result = cluster.run(*words(tmp_path / "run", target, prompts, tmp_path / "servers"))
    assert result.code == 2, result.stderr
    assert "has no room for servers: 1 x (1 CPUs, 8 GPUs)" in result.stderr


def test_servers_on_loopback_are_not_asked_from_other_nodes(target: Path, tmp_path: Path) -> None:
    """Whose loopback is another one; a driver's node that gives Ray no CPUs can ask nobody then."""
    with Nodes(head_cpus=0) as nodes, fake_server(target) as server:
        nodes.add(num_cpus=4)
        prompts = write_prompts(tmp_path / "p.jsonl", 3)
        result = nodes.jobs.run(*settings(tmp_path / "run", target, prompts, server.url))
        assert row_requests(server) == []
    assert result.code == 2, result.stderr
    assert f"The nodes that reach {server.url} give Ray no CPUs to ask from" in result.stderr
