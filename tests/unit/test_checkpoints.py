"""Training goes on from the newest checkpoint that is whole and says of itself what its folder says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_ray import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (3, 6):
        checkpoints.save(tmp_path, step, "plan", {"step": step, "weight": torch.ones(2)}, best=step == 6)
    return tmp_path


def test_the_newest_checkpoint_of_the_plan_is_taken(folder: Path) -> None:
    found = checkpoints.latest(folder, "plan")
    assert found is not None
    assert (found.next_step, found.load()["step"]) == (6, 6)
    assert checkpoints.best(folder, "plan") == found
    assert checkpoints.latest(folder, "another plan") is None


@pytest.mark.parametrize(
    "change", [{"next_step": 5}, {"next_step": "6"}, {"sha256": "0" * 64}, {"sha256": None}, {"plan": ["plan"]}]
)
def test_a_checkpoint_that_says_other_things_than_were_written_is_passed_over(
    folder: Path, change: dict[str, Any]
) -> None:
    path = folder / "00000006" / "about.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = checkpoints.latest(folder, "plan")
    assert found is not None
    assert (found.next_step, found.load()["step"]) == (3, 3)
    assert checkpoints.best(folder, "plan") is None


@pytest.mark.parametrize("text", ["", "[]", "3", '{"plan": "plan"}', "\0" * 100])
def test_a_checkpoint_that_says_nothing_is_passed_over(folder: Path, text: str) -> None:
    (folder / "00000006" / "about.json").write_text(text)
    assert checkpoints.latest(folder, "plan") == checkpoints.Checkpoint(folder / "00000003", 3)


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(folder: Path) -> None:
    (folder / "00000006").rename(folder / "00000009")
    assert checkpoints.latest(folder, "plan") == checkpoints.Checkpoint(folder / "00000003", 3)
