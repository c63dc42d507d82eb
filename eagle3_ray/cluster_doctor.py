"""What keeps a cluster from doing its work, found before a job does: one line for each finding, with its remedy.

An actor on each node looks at that node (`node_probe`); `judge` turns what it saw into findings and knows nothing of
Ray, so that every judgement has a test of its own.
"""

import os
import platform
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle3_ray.node_probe import NodeFacts, NodeProbe, SGLang, reads, source_code

SGLANG_VERSION = "0.5.23"
CAPTURE_SHM_BYTES = 4 << 30  # what a capturing SGLang keeps in /dev/shm beside Ray's object store
_OPEN_FILES = 65_536  # what Ray asks for (ray 2.60: scripts.py)
_SPILL_LIMIT = 0.95  # ray 2.60 neither spills nor makes objects on a disk that is fuller (local_fs_capacity_threshold)
_PATIENCE_S = 120
_PROBE_PREFIX = ".eagle3_ray-doctor-"

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is a sentence, empty only where all is well."""

    level: Level
    where: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:4} {self.where}: {self.text}." + (f" {self.remedy}" if self.remedy else "")


def examine(
    storage: str | None, endpoints: Sequence[str], sglang_python: str | None, api_key: str | None
) -> list[Finding]:
    """Looks at the Ray cluster that this process is connected to. Takes seconds, up to two minutes if a node hangs.

    `sglang_python` is the command of SGLang's own Python; where None, this package's Python is asked, and a missing
    SGLang is no more than a warning.
    """
    findings, probes = [Finding("OK", "ray", f"version {ray.__version__}, Python {platform.python_version()}")], {}
    nodes = {_name(node): node for node in ray.nodes() if node["Alive"]}
    looks = {}
    for name, node in nodes.items():
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probes[name] = NodeProbe.options(scheduling_strategy=pinned).remote()  # type: ignore[attr-defined]
        looks[name] = probes[name].look.remote(
            name, node["Resources"], sglang_python or sys.executable, sglang_python is not None
        )
    deadline, facts = time.monotonic() + _PATIENCE_S, []
    for name, look in looks.items():
        try:
            seen = ray.get(look, timeout=max(1.0, deadline - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError) as error:
            last = str(error).strip().splitlines()[-1]
            remedy = "Install this package, for the same Python, on every node; `ray logs` on it has the whole error."
            findings.append(Finding("FAIL", name, f"it cannot run this package ({last})", remedy))
            del probes[name]
        else:
            facts.append(_with_clock(seen, probes[name]))
    ours = "RAY_ADDRESS" not in os.environ  # a cluster of our own, which ends with us
    if ours:
        remedy = "Set RAY_ADDRESS, or submit this with `ray job submit`, to look at a cluster."
        findings.append(Finding("WARN", "ray", "RAY_ADDRESS is not set, so only this machine is looked at", remedy))
    else:
        findings += judge_access({node.name: node.token_auth for node in facts}, _dashboard_host())
    findings += judge(facts, source_code(), sglang_python is not None)
    findings += _ports({name: (probe, nodes[name]["NodeManagerAddress"]) for name, probe in probes.items()})
    if storage:
        findings += _storage(storage, probes)
    for url in endpoints:
        findings += judge_endpoint(url, {name: ray.get(p.ask.remote(url, api_key)) for name, p in probes.items()})
    return findings


def judge_access(token_auth: Mapping[str, bool], dashboard: str) -> Iterator[Finding]:
    """Who may run code: node name to whether it wants a token; the address that the dashboard listens on, if any."""
    token = all(token_auth.values())
    if token:
        yield Finding("OK", "auth", "every node wants a token")
    else:
        open_nodes = ", ".join(name for name, wants_token in token_auth.items() if not wants_token)
        yield Finding(
            "FAIL" if len(token_auth) > 1 else "WARN",
            "auth",
            f"no token is asked for on {open_nodes}: whoever reaches its ports runs code there",
            "Run `ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and start Ray with "
            "RAY_AUTH_MODE=token.",
        )
    if dashboard and dashboard not in ("127.0.0.1", "localhost"):
        yield Finding(
            "WARN" if token else "FAIL",
            "dashboard",
            f"it listens on {dashboard}, where others than this machine see it",
            "Start the head with --dashboard-host=127.0.0.1 and reach it by `ssh -L 8265:127.0.0.1:8265 HEAD`, or "
            "close the port to the world.",
        )


def judge(facts: Sequence[NodeFacts], our_code: str, sglang_required: bool) -> Iterator[Finding]:
    """What the nodes' own facts mean. A missing SGLang is a failure only where one is required."""
    drivers = sorted({driver for node in facts for driver in node.drivers})
    if len(drivers) > 1:
        yield Finding("WARN", "driver", f"the nodes have NVIDIA drivers {', '.join(drivers)}", "Install one on all.")
    for node in facts:
        for level, text, remedy in _judge_node(node, our_code, sglang_required):
            yield Finding(level, node.name, text, remedy)


def _judge_node(node: NodeFacts, our_code: str, sglang_required: bool) -> Iterator[tuple[Level, str, str]]:
    if node.code == our_code:
        yield "OK", f"eagle3_ray {node.code}", ""
    else:
        yield (
            "FAIL",
            f"it has eagle3_ray {node.code}, this machine {our_code}",
            "Install the same checkout on both (`ray up cluster.yaml` does), or jobs run two programs.",
        )
    yield from _judge_gpus(node)
    if node.sglang is not None:
        yield from _judge_sglang(node.sglang, sglang_required)
    need = node.object_store + (CAPTURE_SHM_BYTES if node.ray_gpus else 0)
    shm = f"/dev/shm has {_gib(node.shm)}, Ray's object store {_gib(node.object_store)}"
    remedy = "Enlarge it (`mount -o remount,size=...`, docker --shm-size, emptyDir sizeLimit), or start Ray with a "
    remedy += "smaller --object-store-memory."
    if node.shm < node.object_store:
        yield "FAIL", f"{shm}, which then lies on disk", remedy
    elif node.shm < need:
        yield "WARN", f"{shm}, and a capturing SGLang wants {_gib(CAPTURE_SHM_BYTES)} more", remedy
    else:
        yield "OK", shm, ""
    full = 1 - node.disk_free / node.disk_total
    disk = (
        f"{_gib(node.disk_free)} of {_gib(node.disk_total)} are free in {node.spill_folder}, where Ray spills objects"
    )
    remedy = "Free some space or start Ray with --object-spilling-directory on a larger disk."
    if full > _SPILL_LIMIT:
        yield "FAIL", f"{disk}; Ray stops at {_SPILL_LIMIT:.0%} full", remedy
    elif full > _SPILL_LIMIT - 0.1:
        yield "WARN", f"{disk}; Ray stops at {_SPILL_LIMIT:.0%} full", remedy
    else:
        yield "OK", disk, ""
    unlimited = node.open_files == resource.RLIM_INFINITY
    if unlimited or node.open_files >= _OPEN_FILES:
        yield "OK", f"open files: {'no limit' if unlimited else f'up to {node.open_files:,}'}", ""
    else:
        remedy = f"Start Ray behind `ulimit -n {_OPEN_FILES}` (cluster.yaml does)."
        yield "WARN", f"a process may open {node.open_files:,} files, which many connections use up", remedy
    skew = f"its clock is {node.clock_s:+.2f} s from ours (measured to {node.clock_bound_s:.2f} s)"
    certain = abs(node.clock_s) - node.clock_bound_s
    if certain > 1:
        yield "FAIL" if certain > 60 else "WARN", skew, "Run chrony or systemd-timesyncd on every node."
    else:
        yield "OK", skew, ""


def _judge_gpus(node: NodeFacts) -> Iterator[tuple[Level, str, str]]:
    if node.gpus and len(node.gpus) == node.ray_gpus:
        kinds = " and ".join(sorted(set(node.gpus)))
        yield "OK", f"{node.ray_gpus} x {kinds}, driver {', '.join(node.drivers)}", ""
    elif node.gpus:
        yield (
            "WARN",
            f"nvidia-smi sees {len(node.gpus)} GPUs, Ray counts {node.ray_gpus}",
            "Start Ray with --num-gpus and without CUDA_VISIBLE_DEVICES if all are to be used.",
        )
    elif node.ray_gpus:
        yield (
            "FAIL",
            f"Ray counts {node.ray_gpus} GPUs, nvidia-smi shows none",
            "Install the NVIDIA driver, or give the container its GPUs (--gpus all, nvidia.com/gpu).",
        )
    else:
        yield "OK", "no GPUs", ""


def _judge_sglang(sglang: SGLang, required: bool) -> Iterator[tuple[Level, str, str]]:
    install = f"Install sglang=={SGLANG_VERSION} there; --sglang-python names the Python that has it."
    if sglang.version is None:
        yield "FAIL" if required else "WARN", "it has no SGLang, so a job can start no server there", install
    elif sglang.plugin_error:
        remedy = "Capture through SGLang needs torch and safetensors in SGLang's Python."
        yield "FAIL", f"the capture plugin does not load ({sglang.plugin_error})", remedy
    elif sglang.version != SGLANG_VERSION:
        yield "WARN", f"SGLang {sglang.version} is not the version that capture was tested with", install
    else:
        yield "OK", f"SGLang {sglang.version}, the capture plugin loads", ""


def judge_endpoint(url: str, answers: Mapping[str, dict[str, Any] | str]) -> Iterator[Finding]:
    """What the nodes' views of one SGLang server mean: node name to its /server_info, or to why there is none."""
    silent = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    info = next((answer for answer in answers.values() if isinstance(answer, dict)), None)
    for node, reason in silent.items():
        remedy = "Any node may send requests: open the port, and give SGLang --host 0.0.0.0 (or its network address)."
        if info is None:
            remedy = "Start the server, or correct --endpoints."
        yield Finding("FAIL", url, f"{node} gets no answer ({reason})", remedy)
    if info is None:
        return
    yield Finding("OK", url, f"it is SGLang {info.get('version')} and serves {info.get('model_path')}")
    if info.get("speculative_algorithm") and not info.get("enable_return_aux_hidden_states"):
        remedy = "Start it without --speculative-algorithm: a target is measured and recorded without its drafter."
        yield Finding("FAIL", url, f"it speculates ({info['speculative_algorithm']})", remedy)
    if info.get("enable_strict_thinking"):
        yield Finding("FAIL", url, "it filters tokens", "Start it without --enable-strict-thinking.")
    if info.get("reasoning_parser"):
        remedy = "The probe of a job (jobs/generate.py ... --dry-run) shows whether ids suffer; better start without."
        yield Finding("WARN", url, f"it has the reasoning parser {info['reasoning_parser']}", remedy)


def _with_clock(facts: NodeFacts, probe: Any) -> NodeFacts:
    """Adds the clock's difference, from the quickest of five round trips: the answer lies somewhere within it."""
    best = (float("inf"), 0.0)
    for _ in range(5):
        start = time.time()
        there = ray.get(probe.clock.remote(), timeout=_PATIENCE_S)
        bound = (time.time() - start) / 2
        best = min(best, (bound, there - start - bound))
    return replace(facts, clock_bound_s=best[0], clock_s=best[1])


def _ports(probes: Mapping[str, tuple[Any, str]]) -> Iterator[Finding]:
    """Every node connects to a new port of every other: torch.distributed and Ray's workers use ports of any number."""
    if len(probes) < 2:
        return
    listening = ray.get([probe.listen.remote() for probe, _ in probes.values()], timeout=_PATIENCE_S)
    places = [(name, address, port) for (name, (_, address)), port in zip(probes.items(), listening, strict=True)]
    asked = {name: probe.reach.remote([p for p in places if p[0] != name]) for name, (probe, _) in probes.items()}
    failed = [f"{name} to {there}" for name, reach in asked.items() for there in ray.get(reach)]
    for line in failed:
        remedy = "Open all ports between the nodes (not to the world): Ray's workers and NCCL use any."
        yield Finding("FAIL", "ports", f"no connection from {line}", remedy)
    if not failed:
        yield Finding("OK", "ports", f"all {len(probes)} nodes reach each other on a new port")


def _storage(storage: str, probes: Mapping[str, Any]) -> Iterator[Finding]:
    """Each node writes a file, and each node and this machine read all of them."""
    folder = str(Path(storage).expanduser().absolute() / f"{_PROBE_PREFIX}{uuid.uuid4().hex}")
    remedy = "Mount the same storage at this path on every node, writable for the user that runs Ray."
    try:
        problems = {name: ray.get(probe.write.remote(folder, name)) for name, probe in probes.items()}
        written = [name for name, problem in problems.items() if not problem]
        for name, problem in problems.items():
            if problem:
                yield Finding("FAIL", name, f"it cannot write to {storage} ({problem})", remedy)
        unread = {name: ray.get(probe.unread.remote(folder, written)) for name, probe in probes.items()}
        unread["this machine"] = [name for name in written if not reads(Path(folder) / name, name)]
        for name, missing in unread.items():
            if missing:
                text = f"{name} does not see in {storage} what {', '.join(missing)} wrote"
                yield Finding("FAIL", "storage", text, remedy)
        if len(written) == len(probes) and not any(unread.values()):
            free = shutil.disk_usage(storage).free
            yield Finding("OK", "storage", f"{storage} is one place for all nodes, {_gib(free)} free")
    finally:
        ray.get([probe.erase.remote(folder) for probe in probes.values()])


def _dashboard_host() -> str:
    return str(ray._private.worker.get_dashboard_url() or "").rpartition(":")[0]


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"  # two nodes may share a host, as in tests


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"
