# mypy: allow-subclassing-any
"""What every training worker does: takes its batches of each step of the plan, plays TTT, reduces, steps, validates.

The loss of a step is a sum over supervised positions divided by their number in the whole step, which the plan tells.
So it depends neither on packing nor on the number of workers, and a worker without a batch left adds an empty one.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from eagle3_ray import checkpoints
from eagle3_ray.acceptance.tally import VALIDATION_STEPS
from eagle3_ray.batches import Batch, Step, pack, steps
from eagle3_ray.config import Train
from eagle3_ray.corpus import Corpus
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import export
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.rollout import Rollout, TargetHead, rollout
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.drafting import from_checkpoint, from_scratch
from eagle3_ray.feeds import CacheFeed, Fed, Feed, StreamFeed
from eagle3_ray.metrics import TrainMetrics
from eagle3_ray.runs import INITIAL, RunError, WriterLock, write_json
from eagle3_ray.target.parts import load_parts
from eagle3_ray.train_log import StepLog
from eagle3_ray.train_numbers import Totals, acceptance_length, sum_over_workers

CLIP_NORM = 0.5
STOP = ".stop"
FINISHED = "finished.json"


@dataclass(frozen=True)
class TrainSettings:
    """All that a worker needs to know; plain values, since Ray carries them to every worker."""

    corpus: Corpus
    train_rows: tuple[int, ...]
    heldout_rows: Mapping[str, tuple[int, ...]]  # by partition
    folder: Path  # RUN/train
    target: Path
    train: Train
    drafter: DrafterConfig  # of one from scratch
    vocabulary: DraftVocabulary  # of one from scratch
    plan: str  # names everything that the steps depend on
    token: str  # of the job that owns the run
    cache: Path | None  # of the states; None where targets stream them
    storage: str
    targets: Sequence[Any]  # capturing actors of the stream
    dtype: str  # computed in


def train_loop(config: dict[str, Any]) -> None:
    """The function that Ray Train runs on every worker."""
    worker = Worker(config["settings"])
    try:
        worker.run()
    finally:
        worker.close()


class _Play(torch.nn.Module):
    """The drafter and one rollout of it as a module, which is what DDP and FSDP wrap."""

    def __init__(self, drafter: Eagle3Drafter, head: TargetHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.drafter = drafter
        self._rollout = partial(rollout, drafter, head=head, compute_dtype=dtype)

    def forward(self, batch: Any, **how: Any) -> Rollout:
        return self._rollout(batch=batch, **how)


@dataclass(frozen=True)
class _Piece:
    """What one worker does in one round of a step. `weight` is 0 where there is no batch left for it."""

    step: Step
    batch: Batch
    number: int  # of the batch in the step
    weight: float
    last: bool


class Worker:
    """One worker's model, optimiser and place in the plan."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        gpu = settings.train.gpus_per_worker > 0
        self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        if not gpu:
            torch.set_num_threads(max(1, int(settings.train.cpus_per_worker)))
        corpus = settings.corpus
        self._plan = list(
            steps(
                corpus.tokens,
                settings.train_rows,
                batch_tokens=settings.train.batch_tokens,
                step_tokens=settings.train.step_tokens,
                epochs=settings.train.epochs,
                seed=settings.train.seed,
            )
        )
        self._feed: Feed = (
            CacheFeed(corpus, settings.cache, settings.drafter.hidden_size, settings.storage)
            if settings.cache
            else StreamFeed(corpus, settings.targets, self._rank)
        )
        self._checkpoints = settings.folder / "checkpoints"
        found = checkpoints.latest(self._checkpoints, settings.plan)
        self._model = self._build()
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=settings.train.learning_rate, weight_decay=0.0)
        self._first = 0
        self._best = 0.0
        self._unimproved = 0
        if found is not None:
            self._restore(found)
        self._metrics = TrainMetrics()
        self._log = StepLog(settings.folder, settings.plan, self._first) if self._rank == 0 else None

    def run(self) -> None:
        """Trains to the plan's end, to a lasting lack of improvement, or until the driver asks to stop."""
        if self._ended(self._first):  # killed between its last checkpoint and its mark
            self._finish(self._first)
            return
        mine = self._pieces(self._first)
        totals = Totals(self._settings.train.ttt_steps)
        feed = self._feed.batches(piece.batch for piece in self._pieces(self._first))
        asked = time.monotonic()
        for piece, fed in zip(mine, feed, strict=True):
            waited = time.monotonic() - asked
            if self._asked_to_stop():
                self._optimiser.zero_grad()
                self._save(piece.step.number, best=False)
                return
            totals.add(self._play(piece, fed), fed, waited, piece.weight)
            if piece.last:
                done = piece.step.number + 1
                self._step(piece.step, totals)
                totals = Totals(self._settings.train.ttt_steps)
                if self._after_step(done):
                    self._finish(done)
                    return
            asked = time.monotonic()

    def close(self) -> None:
        """Ends the curves."""
        if self._log is not None:
            self._log.close()

    # ---- one step

    def _play(self, piece: _Piece, fed: Fed) -> Rollout:
        """Forward and backward of one batch; gradients add up until the step's last batch."""
        settings = self._settings
        alone = piece.step.number < settings.train.one_step_share * len(self._plan)
        with self._sync(piece.last):
            played: Rollout = self._model(
                fed.batch.to(self._device),
                ttt_steps=1 if alone else settings.train.ttt_steps,
                step_decay=settings.train.step_decay,
                loss=settings.train.loss,
                columns_share=settings.train.columns_share,
                generator=self._draw(piece),
            )
            share = piece.weight * self._world / self._supervised(piece.step)  # DDP and FSDP average over workers
            (played.loss * share).backward()
        return played

    def _step(self, step: Step, totals: Totals) -> None:
        train = self._settings.train
        rate = train.learning_rate * _rate(step.number, len(self._plan), train.warmup_share)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"The gradient of step {step.number} is {float(norm)}. Lower train.learning_rate, or look at the data."
            )
        self._optimiser.step()
        self._optimiser.zero_grad()
        numbers = totals.reduced(self._device, self._world)
        numbers |= {"learning_rate": rate, "gradient_norm": float(norm)}
        self._metrics.stepped(numbers)
        if self._log is not None:
            self._log.step(step, len(self._plan), numbers)

    def _after_step(self, done: int) -> bool:
        """Validates and saves where it is due; True ends the training."""
        settings, end = self._settings, done == len(self._plan)
        improved = False
        due = bool(settings.heldout_rows) and (end or done % settings.train.validate_every == 0)
        numbers = self._validate() if due else None
        if numbers is not None:
            improved = numbers["chain_acceptance_length"] > self._best
            self._best = max(self._best, numbers["chain_acceptance_length"])
            self._unimproved = 0 if improved else self._unimproved + 1
            if self._log is not None:
                self._log.validation(done, numbers)
            ray.train.report({"step": done, **{k: v for k, v in numbers.items() if k != "partitions"}})
        ended = self._ended(done)
        if ended or due or done % settings.train.checkpoint_every == 0:
            self._save(done, best=improved or (end and not self._best))
        return ended

    def _ended(self, done: int) -> bool:
        """At the plan's end, or after so many validations without an improvement."""
        patience = self._settings.train.patience
        return done == len(self._plan) or (patience is not None and self._unimproved >= patience)

    def _finish(self, done: int) -> None:
        if self._rank == 0:
            write_json(self._settings.folder / FINISHED, {"plan": self._settings.plan, "step": done})

    def _validate(self) -> dict[str, Any] | None:
        """Cross entropy and chain acceptance length of the held-out sequences, by partition and in all.

        None where all of them were set aside, and nothing is measured.
        """
        self._model.eval()
        total = np.zeros(4)
        partitions = {}
        for partition, rows in sorted(self._settings.heldout_rows.items()):
            batches = pack(self._settings.corpus.tokens, rows, self._settings.train.batch_tokens, (0,))
            rounds = math.ceil(len(batches) / self._world)
            mine = [batches[min(r * self._world + self._rank, len(batches) - 1)] for r in range(rounds)]
            sums = np.zeros(4)
            for r, fed in enumerate(self._feed.batches(mine)):
                with torch.no_grad():
                    played = self._model(fed.batch.to(self._device), ttt_steps=VALIDATION_STEPS, columns_share=1.0)
                if r * self._world + self._rank < len(batches):
                    sums += [
                        float(played.step_loss_sums[0]),
                        float(played.step_counts[0]),
                        float(played.chain_accepted),
                        float(played.chain_starts),
                    ]
            sums = sum_over_workers(sums, self._device)
            total += sums
            if sums[3]:
                partitions[partition] = acceptance_length(sums)
        self._model.train()
        if not partitions:
            return None
        return {
            "loss": total[0] / max(1.0, total[1]),
            "chain_acceptance_length": acceptance_length(total),
            "partitions": partitions,
        }

    # ---- plan and place

    def _pieces(self, first: int) -> Iterator[_Piece]:
        for step in self._plan[first:]:
            rounds = math.ceil(len(step.batches) / self._world)
            for r in range(rounds):
                number = r * self._world + self._rank
                some = number < len(step.batches)
                yield _Piece(step, step.batches[number if some else 0], number, float(some), r == rounds - 1)

    def _supervised(self, step: Step) -> int:
        """Answer tokens of the step that a drafter can be asked for: all but the first two of a sequence."""
        corpus = self._settings.corpus
        rows = np.fromiter((row for batch in step.batches for row in batch.rows), np.int64)
        labels = corpus.tokens[rows] - np.maximum(corpus.prompt_tokens[rows], 2)
        return max(1, int(labels.clip(0).sum()))

    def _draw(self, piece: _Piece) -> torch.Generator:
        """Randomness that depends on the place in the plan only."""
        seeds = np.random.SeedSequence([self._settings.train.seed, piece.step.number, piece.number])
        return torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))

    def _asked_to_stop(self) -> bool:
        run = str(self._settings.folder.parent)
        if not WriterLock.is_current(run, self._settings.token):
            raise RunError(f"another job has taken over {run}; this one trains no further")
        asked = float((self._settings.folder / STOP).exists())
        if self._world == 1:
            return asked > 0
        flag = torch.tensor([asked], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item() > 0)

    # ---- model and checkpoints

    def _build(self) -> torch.nn.Module:
        settings = self._settings
        parts = load_parts(settings.target, torch.float32)
        sample = self._sample()
        if settings.train.drafter is None:
            drafter = from_scratch(settings.drafter, settings.vocabulary, parts, sample, settings.train.seed)
        else:
            drafter = from_checkpoint(Path(settings.train.drafter), parts.config, sample)
        if self._rank == 0 and not (settings.folder / INITIAL).exists():
            export(drafter, settings.folder / INITIAL, parts.config, torch.float32)
        compute = getattr(torch, settings.dtype)
        head = TargetHead(
            parts.embed_tokens.to(self._device, compute),
            parts.lm_head.to(self._device, compute),
            parts.config.get("final_logit_softcapping"),
        )
        play = _Play(drafter.to(self._device), head, compute)
        if self._world == 1:
            return play
        if settings.train.strategy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            return fully_shard(play)
        return DistributedDataParallel(play)

    def _sample(self) -> torch.Tensor:
        """Captured states [T, 3H] of the plan's first batch that has any: all of a batch may have been set aside."""
        batches = ([batch] for step in self._plan for batch in step.batches)
        found = (next(iter(self._feed.batches(batch))).batch.aux_hidden for batch in batches)
        sample = next((states for states in found if bool(states.any())), None)
        if sample is None:
            raise RunError("all sequences to train on were set aside; python jobs/doctor.py says why")
        return sample

    def _sync(self, last: bool) -> Any:
        """Gradients travel between workers with the last batch of a step."""
        if isinstance(self._model, DistributedDataParallel):
            return nullcontext() if last else self._model.no_sync()
        if hasattr(self._model, "set_requires_gradient_sync"):
            self._model.set_requires_gradient_sync(last)
        return nullcontext()

    def _save(self, next_step: int, best: bool) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(self._model, options=options),
            "optimiser": get_optimizer_state_dict(self._model, self._optimiser, options=options),
            "best": self._best,
            "unimproved": self._unimproved,
        }
        if self._rank == 0:
            checkpoints.save(self._checkpoints, next_step, self._settings.plan, state, best)
            if self._log is not None:
                self._log.checkpoint(next_step, best)
        if self._world > 1:
            dist.barrier()

    def _restore(self, found: checkpoints.Checkpoint) -> None:
        options = StateDictOptions(full_state_dict=True)
        state = found.load()
        set_model_state_dict(self._model, state["model"], options=options)
        set_optimizer_state_dict(self._model, self._optimiser, state["optimiser"], options=options)
        self._first, self._best, self._unimproved = found.next_step, state["best"], state["unimproved"]


def _rate(step: int, total: int, warmup_share: float) -> float:
    """Linear warm-up, then a cosine to zero: the factor of the learning rate at `step`."""
    warmup = max(1, round(warmup_share * total))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
