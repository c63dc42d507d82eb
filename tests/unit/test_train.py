"""What a training is known by, and what its settings reach."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_ray import capture, train
from eagle3_ray.config import Train, load
from eagle3_ray.drafter.rollout import Rollout
from eagle3_ray.runs import RunDir
from eagle3_ray.trainer import Worker


def test_another_loss_is_another_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "fingerprint_of", lambda *_: {"capture.storage": "bf16"})
    anything: Any = None
    known = []
    for loss in ("kl", "lk"):
        config = load("smollm2-cpu", [f"run.dir={tmp_path}", f"train.loss={loss}"])
        known.append(train._fingerprint(RunDir(tmp_path), config, anything, anything))
    assert {field for field in known[0] if known[0][field] != known[1][field]} == {"train.loss"}


def test_a_worker_plays_the_loss_of_its_settings() -> None:
    asked: dict[str, Any] = {}

    def model(batch: Any, **how: Any) -> Rollout:
        asked.update(how)
        nothing = torch.zeros(2)
        return Rollout(torch.zeros((), requires_grad=True), nothing, nothing, nothing, nothing[0], nothing[0])

    worker: Any = object.__new__(Worker)
    worker._settings = SimpleNamespace(train=Train(one_step_share=0.0, ttt_steps=2, loss="lk", columns_share=0.5))
    worker._plan, worker._world, worker._device, worker._model = [None], 1, torch.device("cpu"), model
    worker._supervised = lambda step: 1
    piece = SimpleNamespace(step=SimpleNamespace(number=0), number=0, last=True, weight=1.0)
    worker._play(piece, SimpleNamespace(batch=torch.zeros(1)))
    assert (asked["loss"], asked["ttt_steps"], asked["step_decay"]) == ("lk", 2, 0.8)
