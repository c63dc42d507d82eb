"""SGLang's own virtual environment: its pins differ from the product's, so the two never share one.

The environment is named after the hash of `pins.toml`, and its marker is written last. A folder without the marker is
an install that somebody killed; it is removed and made again, since pip leaves no way to tell what it lacks.
"""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_ray.sglang_cpu.cache import cache_folder, locked

PINS = Path(__file__).with_name("pins.toml")
MARKER = "installed"
TAIL_LINES = 15
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


class InstallFailed(RuntimeError):
    """A step of making the environment or the model failed; the message ends with the step's own last lines."""


@dataclass(frozen=True)
class Step:
    """One pip call."""

    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()


def read_steps() -> list[Step]:
    tables = tomllib.loads(PINS.read_text())["step"]
    return [Step(tuple(table["requirements"]), tuple(table.get("options", ()))) for table in tables]


def venv_folder(cache: Path, pins: Path = PINS) -> Path:
    return cache / f"sglang-cpu-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"


def run(command: Sequence[str | Path], remedy: str) -> None:
    """Runs a command without showing its output, unless it fails."""
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        tail = deque(process.stdout, maxlen=TAIL_LINES)
    if process.returncode != 0:
        shown = " ".join(map(str, command[:6]))
        raise InstallFailed(
            f'"{shown} ..." ended with exit code {process.returncode}. {remedy} '
            f"Its last lines:\n{''.join(tail).rstrip()}"
        )


def install(cache: Path | None = None) -> Path:
    """Returns SGLang's virtual environment, making it first if need be (70 seconds and 2.6 GB with a near index)."""
    root = cache_folder(cache)
    venv = venv_folder(root)
    marker = venv / MARKER
    if marker.exists():
        return venv
    with locked(root / f"{venv.name}.lock"):
        if not marker.exists():
            make_venv(venv, read_steps())
            marker.write_text(f"{sys.version}\n")
    return venv


def make_venv(venv: Path, steps: Sequence[Step]) -> None:
    """Makes the environment from nothing."""
    if venv.exists():
        print(f"removing the unfinished {venv}", flush=True)
        shutil.rmtree(venv)
    print(f"making the virtual environment {venv}", flush=True)
    run(
        [sys.executable, "-m", "venv", venv],
        remedy="Install Python's venv module (Debian and Ubuntu: the package python3-venv) and run install again.",
    )
    for step in steps:
        names = ", ".join(step.requirements[:3])
        more = f" and {len(step.requirements) - 3} more" if len(step.requirements) > 3 else ""
        print(f"installing {names}{more}", flush=True)
        run(
            [venv / "bin" / "python", *PIP, "install", *step.options, *step.requirements],
            remedy="Check that pip reaches its package index and that the disk has 5 GB free, then run install again.",
        )
