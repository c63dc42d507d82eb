"""Hidden states become a drafter, on Ray Train.

corpus -> who trains and who validates -> claim the run -> the draft vocabulary -> targets, if states are streamed ->
TorchTrainer over the batch plan -> the best checkpoint becomes RUN/train/drafter, which SGLang and vLLM load. The
number of the next step is all the progress: after any end, the same command goes on behind the newest whole checkpoint,
on any number of workers.
"""

import hashlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from eagle3_ray import capture, capture_plan, checkpoints, cluster, corpus, drafting
from eagle3_ray.batches import steps
from eagle3_ray.capturer import StreamCapturer
from eagle3_ray.config import Capture, Config, ConfigError, Train
from eagle3_ray.corpus import Corpus
from eagle3_ray.drafter.config import DrafterConfig, DrafterConfigError
from eagle3_ray.errors import explain, root_cause
from eagle3_ray.file_hashes import folder_sha
from eagle3_ray.run_log import say
from eagle3_ray.runs import CAPTURE, DRAFTER, INITIAL, TRAIN, RunDir, RunError, WriterLock, command, read_json
from eagle3_ray.stages import carried_out
from eagle3_ray.target.files import TargetError, TargetFiles, read_config, resolve
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.train_log import LOG, Watch, read_log, seconds_of
from eagle3_ray.trainer import FINISHED, STOP, TrainSettings, train_loop

_NUMBERS = (  # of the train section, all that change the trained drafter
    "draft_vocab_size",
    "fc_norm",
    "norm_output",
    "epochs",
    "learning_rate",
    "warmup_share",
    "ttt_steps",
    "one_step_share",
    "columns_share",
    "step_decay",
    "loss",
    "batch_tokens",
    "step_tokens",
    "heldout",
    "seed",
)


_WAITS_FOR_ROOM = 10
"""Minutes: so often Ray waits a minute for room for all workers, when a node is gone, before the job ends."""


@carried_out(TRAIN)
def run(config: Config) -> dict[str, Any]:
    """Runs the stage to its end, or on from the newest checkpoint, and returns its summary.

    Raises:
        ConfigError, TargetError, RunError: before anything is trained; says what to change.
    """
    started = time.monotonic()
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model, weights=True)
    with WriterLock(run_dir) as lock:
        sequences = corpus.make(run_dir)
        capture.check_corpus_is_of(run_dir, target)
        fingerprint = _fingerprint(run_dir, config, sequences, target)
        plan = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
        run_dir.check(TRAIN, fingerprint)
        done = run_dir.succeeded_with(TRAIN, plan) and (run_dir.stage(TRAIN) / DRAFTER).is_dir()
        if done and (summary := run_dir.summary(TRAIN)) is not None:
            say(f"{run_dir.path} is trained; nothing to do")
            return summary
        _check_cache(run_dir, config, sequences, target)
        cluster.connect()
        cluster.require(*_needs(config))
        settings = _settings(run_dir, config, sequences, target, plan, lock.token)  # refused values are not claimed
        run_dir.claim(TRAIN, fingerprint, {"command": command(sys.argv), "config": config.model_dump()})
        folder = run_dir.stage(TRAIN)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP).unlink(missing_ok=True)
        stopped_by, watch = None, Watch(folder / LOG)
        try:
            with watch, cluster.watched(*_needs(config)):
                _fit(config.train, settings, run_dir.manifest()[TRAIN]["starts"])
        except (ray.exceptions.RayError, ray.train.TrainingFailedError, OSError) as error:
            stopped_by = explain(_cause(error))
        except KeyboardInterrupt:
            stopped_by = "Ctrl-C"
        for states_source in settings.targets:
            ray.kill(states_source)  # its GPUs are for the next stage
        if (folder / STOP).exists():
            stopped_by = "SIGTERM"
        summary = _summarise(run_dir, settings, target, watch, stopped_by, started)
        run_dir.write_summary(TRAIN, summary)
        if summary["status"] == "complete":
            run_dir.succeed(TRAIN, plan)
        return summary


def dry_run(config: Config) -> str:
    """What would be trained on and for how many steps; trains nothing."""
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model, weights=True)
    with WriterLock(run_dir):
        sequences = corpus.make(run_dir)
    _check_cache(run_dir, config, sequences, target)
    return _plan_text(config.train, sequences)


def _plan_text(train: Train, sequences: Corpus) -> str:
    heldout = sequences.heldout(train.heldout)
    rows = np.flatnonzero(~heldout)
    one_epoch = list(
        steps(
            sequences.tokens,
            rows.tolist(),
            batch_tokens=train.batch_tokens,
            step_tokens=train.step_tokens,
            epochs=1,
            seed=train.seed,
        )
    )
    answers = int((sequences.tokens - sequences.prompt_tokens)[rows].sum())
    return (
        f"train: {len(rows):,} sequences, {int(sequences.tokens[rows].sum()):,} tokens ({answers:,} of answers), "
        f"{int(heldout.sum()):,} sequences held out; {train.epochs} epochs of {len(one_epoch):,} steps, "
        f"states by {train.feed}"
    )


def _fit(train: Train, settings: TrainSettings, start: int) -> None:
    """Runs the workers to the plan's end. SIGTERM lets them save first: the second one ends the job at once."""

    def ask_to_stop(*_: Any) -> None:
        (settings.folder / STOP).touch()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"settings": settings},
        scaling_config=ScalingConfig(
            num_workers=train.workers,
            use_gpu=train.gpus_per_worker > 0,
            resources_per_worker=_resources(train),
        ),
        run_config=RunConfig(
            name=f"start-{start}",  # Ray's own record of one start; ours lies beside it
            storage_path=str(settings.folder / "ray"),
            failure_config=FailureConfig(max_failures=train.restarts, controller_failure_limit=_WAITS_FOR_ROOM),
        ),
    )
    usual = signal.signal(signal.SIGTERM, ask_to_stop)
    try:
        trainer.fit()
    finally:
        signal.signal(signal.SIGTERM, usual)


def _resources(train: Train) -> dict[str, float]:
    gpus = {"GPU": float(train.gpus_per_worker)} if train.gpus_per_worker else {}
    return {"CPU": train.cpus_per_worker, **gpus}


def _needs(config: Config) -> list[cluster.Need]:
    train = config.train
    needs = [cluster.Need("train", train.workers, train.cpus_per_worker, train.gpus_per_worker)]
    return needs if train.feed == "cache" else [*needs, capture.need(config.capture)]


def _check_cache(run_dir: RunDir, config: Config, sequences: Corpus, target: TargetFiles) -> None:
    """Raises RunError where training from a cache has none, or one of other data or settings."""
    if config.train.feed != "cache":
        return
    run_dir.check(CAPTURE, capture.fingerprint_of(run_dir, config.capture, sequences, target))
    if not run_dir.succeeded_with(CAPTURE, sequences.key):
        raise RunError(
            f"{run_dir.path} has no complete cache of states. Run jobs/capture.py with this run.dir first, or use "
            "train.feed=stream, which needs none."
        )
    if lacking := capture_plan.Plan.make(run_dir, config.capture, sequences, target).missing:
        raise RunError(
            f"{run_dir.path} lacks {len(lacking)} shards of its cache of states, the first is {lacking[0].name}. Run "
            "jobs/capture.py again: only these are captured."
        )


def _fingerprint(run_dir: RunDir, config: Config, sequences: Corpus, target: TargetFiles) -> dict[str, Any]:
    """All that changes the trained drafter. The number of workers and what they run on is left out on purpose."""
    train = config.train
    states = capture.fingerprint_of(run_dir, config.capture, sequences, target)
    if train.feed == "stream":
        states["capture.storage"] = "stream"
    start = None
    if train.drafter is not None:
        folder = Path(train.drafter)
        if not folder.is_dir():
            raise ConfigError(f"train.drafter={folder} is no folder. Give the folder of a drafter's checkpoint.")
        _check_layers(folder, config.capture, target)
        start = folder_sha(folder)[:16]
    return {
        **states,
        "train.feed": train.feed,
        "train.drafter": start,
        **{f"train.{name}": getattr(train, name) for name in _NUMBERS},
        "train.dtype": _dtype(train),
    }


def _check_layers(drafter: Path, settings: Capture, target: TargetFiles) -> None:
    """Raises ConfigError where a warm start reads other layers than those that are captured: it would learn nothing."""
    try:
        theirs = DrafterConfig.from_json(read_config(drafter), target.config).aux_layers
    except (DrafterConfigError, TargetError) as error:
        raise ConfigError(f"train.drafter={drafter}: {error}") from None
    ours = resolve_layers(target.config, settings.layers)
    if theirs != ours:
        raise ConfigError(
            f"train.drafter={drafter} reads the layers {list(theirs)} and capture.layers gives {list(ours)}. Set "
            f"capture.layers={list(theirs)}; states that were captured of others are of no use to it."
        )


def _dtype(train: Train) -> str:
    return train.dtype or ("bfloat16" if train.gpus_per_worker else "float32")


def _settings(
    run_dir: RunDir, config: Config, sequences: Corpus, target: TargetFiles, plan: str, token: str
) -> TrainSettings:
    train, folder = config.train, run_dir.stage(TRAIN)
    heldout = sequences.heldout(train.heldout)
    train_rows = np.flatnonzero(~heldout).tolist()
    if not train_rows:
        raise ConfigError(f"train.heldout={train.heldout} leaves no sequence to train on; lower it.")
    partitions = sequences.column("partition")
    by_partition = {
        str(name): tuple(np.flatnonzero(heldout & (partitions == name)).tolist())
        for name in np.unique(partitions[heldout])
    }
    layers = resolve_layers(target.config, config.capture.layers)
    try:
        drafter = drafting.new_config(target.config, layers, train.draft_vocab_size, train.fc_norm, train.norm_output)
        vocabulary = drafting.choose_vocabulary(run_dir, sequences, train_rows, drafter, target)
    except ValueError as error:  # the target's RoPE is none that engines serve, or the vocabulary is too small
        raise ConfigError(f"a drafter for {target.name}: {error}") from None
    say(_plan_text(train, sequences))
    if train.drafter is None:
        say(
            f"  draft vocabulary: {drafter.draft_vocab_size:,} of {drafter.vocab_size:,} tokens, "
            f"{vocabulary.coverage:.2%} of the answer tokens",
        )
    return TrainSettings(
        corpus=sequences,
        train_rows=tuple(train_rows),
        heldout_rows=by_partition,
        folder=folder,
        target=target.folder,
        train=train,
        drafter=drafter,
        vocabulary=vocabulary,
        plan=plan,
        token=token,
        cache=run_dir.stage(CAPTURE) / "shards" if train.feed == "cache" else None,
        storage=config.capture.storage,
        targets=_targets(run_dir, config, sequences, target) if train.feed == "stream" else (),
        dtype=_dtype(train),
    )


def _targets(run_dir: RunDir, config: Config, sequences: Corpus, target: TargetFiles) -> list[Any]:
    """Actors that capture as training asks; they outlive a worker, so the target is loaded once."""
    about, what = config.capture, capture.settings_of(run_dir, config, sequences, target)
    actor = ray.remote(StreamCapturer).options(
        num_cpus=about.cpus_per_target, num_gpus=about.gpus_per_target, max_restarts=-1, max_task_retries=-1
    )
    targets = [actor.remote(what) for _ in range(about.targets)]
    ray.get([target.ready.remote() for target in targets])  # the self-check's error, before anything is trained
    return targets


def _summarise(
    run_dir: RunDir, settings: TrainSettings, target: TargetFiles, watch: Watch, stopped_by: str | None, started: float
) -> dict[str, Any]:
    """Reads what the workers left, and exports the best drafter where the training is finished."""
    folder = settings.folder
    log = read_log(folder / LOG)
    trained = [line for line in log if "loss" in line]
    validated = {line["step"]: line["validation"]["chain_acceptance_length"] for line in log if "validation" in line}
    done = folder / FINISHED
    remedy = "Remove it and run jobs/train.py again."
    finished = done.exists() and read_json(done, remedy).get("plan") == settings.plan
    best, newest = (which(folder / "checkpoints", settings.plan) for which in (checkpoints.best, checkpoints.latest))
    found = best or newest
    figure = validated.get(found.next_step) if found else None
    warnings = _warnings(settings, trained)
    if validated and found and not best:
        warnings.append(f"the best checkpoint is damaged or gone; the last one, of step {found.next_step}, stands in")
    drafter_dir = launch = None
    if finished and found is not None:
        drafter_dir = str(folder / DRAFTER)
        about = {
            "fingerprint": run_dir.manifest()[TRAIN]["fingerprint"],
            "step": found.next_step,
            "chain_acceptance_length": figure,
        }
        dtype = getattr(torch, settings.dtype)
        launch = drafting.export_best(Path(drafter_dir), folder / INITIAL, found, target, about, dtype)
    wall_s = time.monotonic() - started
    seconds = sum(map(seconds_of, trained))
    tokens = sum(line["tokens"] for line in trained)
    return {
        "stage": TRAIN,
        "status": "complete" if finished else "stopped" if stopped_by else "incomplete",
        "steps": newest.next_step if newest else 0,
        "expected": trained[-1]["of"] if trained else None,
        "tokens": tokens,
        "set_aside": sum(line["set_aside"] for line in trained),
        "loss": trained[-1]["loss"] if trained else None,
        "chain_acceptance_length": figure,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "wait_share": round(sum(line["wait_share"] for line in trained) / len(trained), 4) if trained else None,
        "drafter_dir": drafter_dir,
        "launch": launch,
        "wall_s": round(wall_s, 1),
        "start_up_s": None if watch.first_step is None else round(watch.first_step - started, 1),
        "busy_s": round(sum(seconds_of(line) * (1 - line["wait_share"]) for line in watch.own(trained)), 1),
        "run_dir": str(run_dir.path),
        "stopped_by": stopped_by,
        "warnings": warnings,
    }


def _warnings(settings: TrainSettings, trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was generated and has not been trained on."""
    said = []
    if damaged := corpus.damaged(settings.corpus):
        said.append(f"{len(damaged)} generated sequences are damaged and were left out, e.g. {damaged[0]}")
    if trained:
        planned = len(settings.train_rows) * settings.train.epochs * len(trained) / trained[-1]["of"]
        share = sum(line["set_aside"] for line in trained) / planned
        if share > 0.02:
            said.append(f"{share:.1%} of the sequences are not the target's own and were not trained on; see the log")
    return said


def _cause(error: BaseException) -> BaseException:
    """The error of the worker that failed first, behind those of Ray and Ray Train."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(next(iter(failures.values())))
    return root_cause(error)
