"""The numbers of a training: sums over the batches of a step and over workers, and what they come to."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.rollout import Rollout
from eagle3_ray.feeds import Fed


class Totals:
    """Sums over the batches of a step."""

    def __init__(self, ttt_steps: int) -> None:
        self._ttt_steps = ttt_steps
        self._sums = np.zeros((3, ttt_steps))
        self._loss = 0.0
        self._tokens = self._labels = self._set_aside = 0
        self._waited = 0.0
        self._started = time.monotonic()

    def add(self, played: Rollout, fed: Fed, waited: float, weight: float) -> None:
        self._waited += waited
        if weight == 0:
            return
        for sums, values in zip(
            self._sums, (played.step_loss_sums, played.step_correct, played.step_counts), strict=True
        ):
            sums[: len(values)] += values.detach().double().cpu().numpy()
        self._loss += float(played.loss.detach())
        self._tokens += len(fed.batch.input_ids)
        self._labels += _labels(fed.batch)
        self._set_aside += fed.set_aside

    def reduced(self, device: torch.device, world: int) -> dict[str, Any]:
        """The step's numbers over all workers; the loss is of what was trained on, without what was set aside."""
        seconds = time.monotonic() - self._started
        scalars = [self._loss, self._labels, self._tokens, self._set_aside, self._waited]
        summed = sum_over_workers(np.concatenate([self._sums.ravel(), scalars]), device)
        losses, correct, counts = summed[:-5].reshape(3, self._ttt_steps)
        played = counts > 0
        return {
            "loss": summed[-5] / max(1.0, summed[-4]),
            "step_losses": (losses[played] / counts[played]).tolist(),
            "step_accuracies": (correct[played] / counts[played]).tolist(),
            "tokens": int(summed[-3]),
            "set_aside": int(summed[-2]),
            "tokens_per_second": summed[-3] / seconds,
            "wait_share": min(1.0, summed[-1] / world / seconds),
        }


def _labels(batch: PackedBatch) -> int:
    """Answer tokens that a drafter can be asked for: all of the mask but the first two tokens of a sequence."""
    starts = batch.cu_seqlens[:-1]
    return int(batch.loss_mask.sum() - batch.loss_mask[starts].sum() - batch.loss_mask[starts + 1].sum())


def acceptance_length(sums: np.ndarray[Any, Any]) -> float:
    """Tokens a target forward gives: the drafts that are right from the start on, and the target's own."""
    return float(1.0 + sums[2] / sums[3])


def sum_over_workers(values: np.ndarray[Any, Any], device: torch.device) -> np.ndarray[Any, Any]:
    if dist.get_world_size() == 1:
        return values
    tensor = torch.from_numpy(values).to(device)
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()  # type: ignore[no-any-return]
