"""The servers of a generate job: those that are named, or those that it starts and keeps up as nodes come and go.

A number of servers is started wherever Ray finds room; `auto` gives every node as many as its GPUs are for. What is
lost with its actor or node is replaced where there is room. One that does not start, or dies as soon as it stands, is
given up with its own last words, and the job with the last of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle3_ray import cluster
from eagle3_ray.background import repeated
from eagle3_ray.config import Config, Generate
from eagle3_ray.errors import explain, root_cause
from eagle3_ray.run_log import say
from eagle3_ray.servers import ManagedServer
from eagle3_ray.sglang.processes import ServerFailed
from eagle3_ray.target.files import TargetFiles

Place = str | None
"""The id of the node where a server has to stand; None is wherever there is room."""

_LOOK_S = 1.0
_GROWTH = 4
"""Times as many nodes that a cluster may come to have while a job runs before its clients are the limit."""

_OWN_CPUS = 1.0
"""CPUs of the cluster that servers leave to the job's own tasks."""

_MOST_STARTS = 3
"""A server that does not start so often in a row is given up: the GPUs of one that was lost may take a while."""


@dataclass
class _Member:
    """A managed server as the driver sees it; `pending` is what its actor was asked last."""

    place: Place
    actor: Any
    pending: Any
    url: str | None = None
    failed_starts: int = 0
    failure: str | None = None


class Crew:
    """Named URLs, and managed servers where there are any: as many at each place as `wanted` says now, made by `start`.

    Each holds so many CPUs of the cluster. `growth` is how many times as many there may be before the job ends.
    """

    def __init__(
        self,
        named: Sequence[str],
        wanted: Callable[[], Counter[Place]] = Counter,
        start: Callable[[Place], Any] = lambda place: None,
        cpus_each: float = 0.0,
        growth: int = 1,
    ) -> None:
        self._cpus_each = cpus_each
        self._growth = growth
        self._named = list(named)
        self._wanted = wanted
        self._start = start
        self._members: list[_Member] = []
        self._stood = False

    def urls(self) -> list[str]:
        """Where servers answer, or did so a moment ago."""
        return [*self._named, *(m.url for m in self._members if m.url is not None and m.failure is None)]

    def most(self) -> int:
        """Servers that clients should be ready for while the job lasts."""
        return len(self._named) + len(self._members) * self._growth

    def cpus(self) -> float:
        """CPUs that the servers hold which we started."""
        return self._cpus_each * sum(member.failure is None for member in self._members)

    def failure(self) -> str | None:
        """Why the last of the servers was given up; None while there is another one, or none yet."""
        left = [*self._named, *(member for member in self._members if member.failure is None)]
        return self._members[-1].failure if self._members and not left else None

    def refresh(self) -> None:
        """Looks at every server, drops those that are lost, and starts those that are missing."""
        for member in list(self._members):
            if member.failure is None and ray.wait([member.pending], timeout=0)[0]:
                self._look(member)
        missing = self._wanted() - Counter(member.place for member in self._members)
        for place in missing.elements():
            actor = self._start(place)
            self._members.append(_Member(place, actor, actor.url.remote()))

    def wait_for_one(self) -> None:
        """Returns when there is a server. Raises ServerFailed where none starts; the message has the end of its log."""
        self.refresh()
        while not self.urls():
            if failure := self.failure():
                raise ServerFailed(failure)
            time.sleep(_LOOK_S)
            self.refresh()

    def stop(self) -> None:
        """Ends all servers that we started, and their actors."""
        if ending := [member.actor.stop.remote() for member in self._members if member.url is not None]:
            ray.wait(ending, num_returns=len(ending), timeout=30)
        for member in self._members:
            ray.kill(member.actor)

    def _look(self, member: _Member) -> None:
        """Takes the answer that is there and asks again."""
        try:
            answer: str | None = ray.get(member.pending)
        except ray.exceptions.RayError as error:
            if not _is_of_the_server(error):
                say(f"{member.url or 'a server that was starting'} is lost with its actor or its node")
                self._members.remove(member)
                ray.kill(member.actor)
                return
            member.failed_starts += 1
            if member.failed_starts == _MOST_STARTS or not self._stood:
                cause = root_cause(error)
                self._give_up(member, str(cause) if isinstance(cause, ServerFailed) else explain(cause))
                return
            member.pending = member.actor.url.remote()
            return
        if member.url is None:
            member.url, member.failed_starts, self._stood = answer, 0, True
        elif answer is not None:
            self._give_up(member, answer)
            return
        member.pending = member.actor.failure.remote()

    def _give_up(self, member: _Member, failure: str) -> None:
        """Frees its GPUs. It stays in the list, so that no other one is started in its place."""
        member.failure = failure
        say(failure)
        ray.kill(member.actor)


def _is_of_the_server(error: ray.exceptions.RayError) -> bool:
    """Whether it was raised by what starts the server, and not by the loss of the actor or its node."""
    return isinstance(error, ray.exceptions.RayTaskError) or getattr(error, "actor_init_failed", False)


def servers_to_start(generate: Generate) -> int | Literal["auto"]:
    """How many servers a job starts: none where it is given some."""
    return 0 if generate.endpoints else generate.servers


@contextmanager
def serving(config: Config, target: TargetFiles) -> Iterator[Crew]:
    """The servers to generate with, as soon as there is one; those that we start end with the block.

    Raises:
        ServerFailed: none started; the message has the end of its log.
        ConfigError: the cluster has no room for them.
    """
    generate, gpus = config.generate, config.generate.gpus_per_server
    count = servers_to_start(generate)
    cpus = server_cpus(gpus)
    if count:
        servers = cluster.Need("servers", 1 if count == "auto" else count, cpus, gpus)
        cluster.require(servers, cluster.Need("the job's own tasks", 1, _OWN_CPUS, 0))
        say(f"starting {count if count != 'auto' else 'all'} SGLang servers; a large model takes minutes")
    model = target.for_sglang()
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 4}

    def start(place: Place) -> Any:
        where = NodeAffinitySchedulingStrategy(place, soft=False) if place else "DEFAULT"
        actor = ray.remote(ManagedServer).options(scheduling_strategy=where, **options)
        return actor.remote(
            model, gpus, config.target.launch, [*config.target.server_args, *generate.server_args], count == "auto"
        )

    growth = _GROWTH if count == "auto" else 1
    crew = Crew(generate.endpoints, lambda: places(count, gpus, ray.nodes()), start, cpus, growth)
    try:
        if count:
            crew.wait_for_one()
        yield crew
    finally:
        crew.stop()


def server_cpus(gpus: int) -> float:
    """CPUs that a managed server reserves; one on a CPU takes what is idle."""
    return 1.0 if gpus else 0.5


def places(count: int | Literal["auto"], gpus: int, nodes: Sequence[dict[str, Any]]) -> Counter[Place]:
    """Where how many servers of that many GPUs should stand; `nodes` as ray.nodes() lists them."""
    if count != "auto":
        return Counter({None: count})
    cpus = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]}
    if cpus:
        cpus[max(cpus, key=lambda name: cpus[name])] -= _OWN_CPUS
    found: Counter[Place] = Counter()
    for node in nodes:
        if (name := node["NodeID"]) in cpus:
            by_gpu = int(node["Resources"].get("GPU", 0.0) / gpus) if gpus else 1
            found[name] = min(int(cpus[name] / server_cpus(gpus)), by_gpu)
    return found


@contextmanager
def kept_up(crew: Crew, registry: Any, telemetry: Any) -> Iterator[None]:
    """For as long as the block lasts: looks after the servers and tells the registry of them."""

    def look() -> None:
        with suppress(ray.exceptions.RayError):  # the next look may be luckier
            crew.refresh()
        registry.offer.remote(crew.urls())
        if failure := crew.failure():
            telemetry.stop.remote(f"No server is left. {failure}")

    with repeated(look, _LOOK_S, "crew"):
        yield
