"""What one node of a cluster says about itself: asked by the cluster's doctor, through an actor pinned to the node.

Knows how to look, and nothing of what is good or bad. Changes nothing but a probe file in the shared storage.
"""

import csv
import hashlib
import os
import resource
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from eagle3_ray import __version__
from eagle3_ray.sglang.processes import clean_environment
from eagle3_ray.sglang.protocol import RequestFailed
from eagle3_ray.sglang.transport import ask

_COMMAND_S = 60
# Runs in SGLang's own Python, which need not hold this package: the plugin comes by PYTHONPATH, as a job brings it.
_ASK_SGLANG = """
from importlib.metadata import PackageNotFoundError, entry_points, version
try:
    print("version", version("sglang"))
except PackageNotFoundError:
    raise SystemExit
(entry,) = {e.value: e for e in entry_points(group="sglang.srt.plugins", name="eagle3_capture")}.values()
print("plugin", entry.load().__name__)
"""


@dataclass(frozen=True)
class SGLang:
    """What a node's SGLang is: its version, None where there is none, and why the plugin does not load, if so."""

    version: str | None
    plugin_error: str


@dataclass(frozen=True)
class NodeFacts:
    """What one node says about itself. Sizes in bytes; `clock_s` is its clock minus ours, within `clock_bound_s`."""

    name: str
    code: str
    token_auth: bool
    ray_gpus: int
    object_store: int
    gpus: tuple[str, ...]
    drivers: tuple[str, ...]
    sglang: SGLang | None
    shm: int
    spill_folder: str
    disk_free: int
    disk_total: int
    open_files: int
    clock_s: float = 0.0
    clock_bound_s: float = 0.0


@ray.remote(num_cpus=0, max_restarts=0)
class NodeProbe:
    """Looks at the node that it runs on."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def look(self, name: str, resources: Mapping[str, float], sglang_python: str, sglang_everywhere: bool) -> NodeFacts:
        """All that needs no other node. SGLang is asked where there are GPUs, or everywhere if told so."""
        gpus = _gpus()
        spill_folder = _spill_folder()
        disk = shutil.disk_usage(spill_folder)
        ray_gpus = int(resources.get("GPU", 0))
        return NodeFacts(
            name=name,
            code=source_code(),
            token_auth=is_token_auth_enabled(),
            ray_gpus=ray_gpus,
            object_store=int(resources.get("object_store_memory", 0)),
            gpus=tuple(gpu for gpu, _ in gpus),
            drivers=tuple(sorted({driver for _, driver in gpus})),
            sglang=ask_sglang(sglang_python) if ray_gpus or sglang_everywhere else None,
            shm=shutil.disk_usage("/dev/shm").total,
            spill_folder=spill_folder,
            disk_free=disk.free,
            disk_total=disk.total,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def clock(self) -> float:
        return time.time()

    def write(self, folder: str, name: str) -> str:
        """Writes a probe file; returns what went wrong, empty if nothing did."""
        try:
            place = Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            with open(place / name, "w") as file:
                file.write(name)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return str(error)
        return ""

    def unread(self, folder: str, names: Sequence[str]) -> list[str]:
        """The probe files that do not read here as they were written."""
        return [name for name in names if not reads(Path(folder) / name, name)]

    def erase(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def listen(self) -> int:
        """Opens a port that lives as long as this actor; returns its number."""
        self._listener = socket.create_server(("", 0))
        return int(self._listener.getsockname()[1])

    def reach(self, places: Sequence[tuple[str, str, int]]) -> list[str]:
        """Connects to (name, address, port) of every node; returns a line for each that cannot be reached."""
        failures = []
        for name, address, port in places:
            try:
                socket.create_connection((address, port), timeout=5).close()
            except OSError as error:
                failures.append(f"{name} ({address}:{port}, {error})")
        return failures

    def ask(self, url: str, api_key: str | None) -> dict[str, Any] | str:
        """An SGLang's /server_info as seen from here, or why there is none."""
        try:
            info = ask(f"{url}/server_info", api_key=api_key)
        except RequestFailed as error:
            return str(error)
        return info if isinstance(info, dict) else f"{str(info)[:80]!r} is no answer of SGLang"


def ask_sglang(python: str) -> SGLang:
    """Asks the SGLang of that Python command for its version, and whether it finds and loads the capture plugin."""
    from eagle3_ray.target.sglang_server import plugin_environment  # imports torch, which takes seconds

    with tempfile.TemporaryDirectory(prefix="eagle3_ray-") as scratch:
        # PYTHONPATH alone: with CAPTURE_DIR set, any later start of SGLang would take itself for a capturing one
        path = plugin_environment(Path(scratch), Path(scratch), 0)["PYTHONPATH"]
        try:
            done = subprocess.run(
                [*shlex.split(python), "-c", _ASK_SGLANG],
                env=clean_environment() | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return SGLang(None, str(error))
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("version ", "plugin ")))
    fault = "" if "plugin" in said else (done.stderr.strip().splitlines() or ["no output"])[-1]
    return SGLang(said.get("version"), fault if "version" in said else "")


def _gpus() -> list[tuple[str, str]]:
    """(name, driver version) of each NVIDIA GPU; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True) if done.returncode == 0 else ()
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def _spill_folder() -> str:
    """Where this node's objects go that do not fit into memory: ray 2.60 tells only its raylet, our parent process."""
    words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    told = [word.partition("=")[2] for word in words if word.startswith("--fallback_directory=")]
    return told[0] if told else str(ray._private.worker._global_node.get_session_dir_path())


def source_code() -> str:
    """This package's version and a hash of its source: two checkouts of one version differ."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"


def reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
