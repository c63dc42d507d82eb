"""Training checkpoints: each a folder that appears whole, with a hash that tells a torn one.

    RUN/train/checkpoints/00000150/state.pt      drafter, optimiser, what validation has seen
    RUN/train/checkpoints/00000150/about.json    the next step, the plan that it belongs to, the hash of state.pt
    RUN/train/checkpoints/best -> 00000100

Ray Train keeps checkpoints too, but finds them through a snapshot file that it writes in place: a job killed while
writing it cannot be resumed (watched with Ray 2.60). Here the folders themselves are the record.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_ray.file_hashes import sha256_of
from eagle3_ray.runs import RunError
from eagle3_ray.torch_files import UnreadableTorchFile, load_plain
from eagle3_ray.whole_files import temporary

_STATE, _ABOUT, _BEST = "state.pt", "about.json", "best"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `next_step` is the first step that it has not seen."""

    folder: Path
    next_step: int

    def load(self) -> dict[str, Any]:
        """The saved state; tensors and plain values only.

        Raises:
            RunError: the file holds something else.
        """
        try:
            return load_plain(self.folder / _STATE)
        except UnreadableTorchFile as error:
            raise RunError(f"{error} Remove the folder {self.folder}; training goes on from an earlier one.") from None


def save(folder: Path, next_step: int, plan: str, state: Mapping[str, Any], best: bool) -> None:
    """Writes a checkpoint, points `best` at it if it is, and deletes all but the last two and the best."""
    place = folder / f"{next_step:08}"
    fresh = temporary(place)
    fresh.mkdir(parents=True)
    torch.save(dict(state), fresh / _STATE)
    about = {"next_step": next_step, "plan": plan, "sha256": sha256_of(fresh / _STATE)}
    (fresh / _ABOUT).write_text(json.dumps(about) + "\n")
    shutil.rmtree(place, ignore_errors=True)
    os.replace(fresh, place)
    if best:
        link = temporary(folder / _BEST)
        link.symlink_to(place.name)
        os.replace(link, folder / _BEST)
    kept = {path.name for path in _folders(folder)[-2:]} | {_best_name(folder)}
    for old in _folders(folder):
        if old.name not in kept:
            shutil.rmtree(old)


def latest(folder: Path, plan: str) -> Checkpoint | None:
    """The newest whole checkpoint of that plan; torn ones are passed over for the one before."""
    for path in reversed(_folders(folder)):
        if (checkpoint := _read(path, plan)) is not None:
            return checkpoint
    return None


def best(folder: Path, plan: str) -> Checkpoint | None:
    """The checkpoint that validated best, if it is whole and one of this folder."""
    name = _best_name(folder)
    return next((_read(path, plan) for path in _folders(folder) if path.name == name), None)


def _read(path: Path, plan: str) -> Checkpoint | None:
    try:
        about = json.loads((path / _ABOUT).read_text())
        told = about["plan"], about["next_step"], about["sha256"]
        whole = told == (plan, int(path.name), sha256_of(path / _STATE))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Checkpoint(path, int(path.name)) if whole else None


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _best_name(folder: Path) -> str | None:
    link = folder / _BEST
    return os.readlink(link) if link.is_symlink() else None
