"""Sequences become hidden states on disk, for training that reads them many times.

corpus (the sequences as one file) -> plan (how many bytes, do they fit) -> claim the run -> shards that are missing ->
capture and prove on actors that own a copy of the target -> a file a shard -> count what is there -> _SUCCESS. A shard
is there or it is not: after any end, the same command captures those that are not.

Training that takes its states from a stream (train.feed) needs none of this.
"""

import hashlib
import logging
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from eagle3_ray import cluster, corpus, run_log
from eagle3_ray.audit import kind_of
from eagle3_ray.capture_plan import Plan, Shard
from eagle3_ray.capturer import CaptureSettings, ShardCapturer
from eagle3_ray.config import Capture, Config, ConfigError
from eagle3_ray.corpus import Corpus
from eagle3_ray.errors import ENDS, explain, root_cause
from eagle3_ray.run_log import say
from eagle3_ray.runs import CAPTURE, GENERATE, RunDir, RunError, WriterLock, command
from eagle3_ray.stages import carried_out
from eagle3_ray.states_cache import about, read_scores
from eagle3_ray.target.files import TargetFiles, resolve
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.on_policy import OnPolicyLimits
from eagle3_ray.target.protocol import BatchHalved, TargetReplaced

_SAY_EVERY_S = 5.0
_EVENTS = {BatchHalved.__name__: "batch halved", TargetReplaced.__name__: "target replaced"}


@carried_out(CAPTURE)
def run(config: Config) -> dict[str, Any]:
    """Runs the stage to its end, or on from where an earlier job stopped, and returns its summary.

    Raises:
        ConfigError, TargetError, RunError: before anything is captured; says what to change.
    """
    started = time.monotonic()
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model, weights=True)
    with WriterLock(run_dir) as lock:
        sequences = corpus.make(run_dir)
        check_corpus_is_of(run_dir, target)
        fingerprint = fingerprint_of(run_dir, config.capture, sequences, target)
        run_dir.check(CAPTURE, fingerprint)
        plan = Plan.make(run_dir, config.capture, sequences, target)
        done = run_dir.succeeded_with(CAPTURE, sequences.key) and not plan.missing
        if done and (summary := run_dir.summary(CAPTURE)) is not None:
            say(f"{run_dir.path} is captured; nothing to do")
            return summary
        say(plan.text())
        plan.check_room()
        cluster.connect()
        cluster.require(need(config.capture))
        run_dir.claim(CAPTURE, fingerprint, {"command": command(sys.argv), "config": config.model_dump()})
        progress = Progress(plan)
        stopped_by = None
        try:
            if plan.missing:
                with cluster.watched(need(config.capture)):
                    _pipeline(run_dir, config, sequences, target, plan, lock.token, progress)
        except ENDS as end:
            stopped_by = explain(root_cause(end))
        summary = _summarise(run_dir, config.capture, sequences, target, progress, stopped_by, started)
        run_dir.write_summary(CAPTURE, summary)
        if summary["status"] == "complete":
            run_dir.succeed(CAPTURE, sequences.key)
        return summary


def dry_run(config: Config) -> str:
    """What would be captured, and whether it fits; captures nothing."""
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model, weights=True)
    with WriterLock(run_dir):
        plan = Plan.make(run_dir, config.capture, corpus.make(run_dir), target)
    return plan.text()


def settings_of(run_dir: RunDir, config: Config, sequences: Corpus, target: TargetFiles) -> CaptureSettings:
    """What a capturing actor needs, from the configuration and from the engine that generated."""
    capture = config.capture
    if capture.endpoints and len(capture.endpoints) != capture.targets:
        raise ConfigError(
            f"capture.endpoints names {len(capture.endpoints)} servers and capture.targets={capture.targets}; there "
            "has to be one server for each target."
        )
    return CaptureSettings(
        corpus=sequences,
        target=target.folder,
        layers=resolve_layers(target.config, capture.layers),
        backend=capture.backend,
        dtype=_dtype(capture),
        gpus=capture.gpus_per_target,
        cpus=capture.cpus_per_target,
        batch_tokens=capture.batch_tokens,
        temperature=run_dir.manifest()[GENERATE]["fingerprint"]["generate.temperature"],
        endpoints=tuple(capture.endpoints),
        server_args=(*config.target.server_args, *capture.server_args),
        launch=config.target.launch,
        trust_remote_code=config.target.trust_remote_code,
        limits=_limits(run_dir),
    )


def _limits(run_dir: RunDir) -> OnPolicyLimits:
    """What rounding alone explains: an engine of less than float32 moves log-probabilities, whatever we capture in."""
    engine = run_dir.manifest()[GENERATE]["fingerprint"].get("engine.dtype", "float32")
    limits = OnPolicyLimits()
    return limits if engine == "float32" else OnPolicyLimits(float32=limits.bfloat16)


def fingerprint_of(run_dir: RunDir, capture: Capture, sequences: Corpus, target: TargetFiles) -> dict[str, Any]:
    """All that changes the cached states: what was generated, the layers, and how numbers are computed and kept."""
    generated = run_dir.manifest()[GENERATE]["fingerprint"]
    return {
        "generate": hashlib.sha256(repr(sorted(generated.items())).encode()).hexdigest()[:16],
        "corpus": sequences.key,
        "capture.layers": str(list(resolve_layers(target.config, capture.layers))),
        "capture.dtype": _dtype(capture),
        "capture.storage": capture.storage,
        "capture.backend": capture.backend,
        "target.weights": target.fingerprint()["target.weights"],
    }


def check_corpus_is_of(run_dir: RunDir, target: TargetFiles) -> None:
    """Raises RunError where the sequences were generated by another model than `target`, as far as files tell."""
    generated, ours = run_dir.manifest()[GENERATE]["fingerprint"], target.fingerprint()
    for field in ("target.tokenizer", "target.config", "target.weights"):
        if generated.get(field) is not None and ours[field] != generated[field]:
            raise RunError(
                f"{run_dir.path} was generated with another model: {field} was {generated[field]} and is now "
                f"{ours[field]}. Set target.model to the model that generated the data."
            )


def need(capture: Capture) -> cluster.Need:
    """What the copies of the target take of the cluster."""
    return cluster.Need("capture", capture.targets, capture.cpus_per_target, capture.gpus_per_target)


def _dtype(capture: Capture) -> str:
    return capture.dtype or ("bfloat16" if capture.gpus_per_target else "float32")


def _pipeline(
    run_dir: RunDir,
    config: Config,
    sequences: Corpus,
    target: TargetFiles,
    plan: Plan,
    token: str,
    progress: "Progress",
) -> None:
    capture = config.capture
    work = [{"shard": shard.name, "rows": list(shard.rows)} for shard in plan.missing]
    stored = ray.data.from_items(work, override_num_blocks=len(work)).map_batches(
        ShardCapturer,
        fn_constructor_args=(
            settings_of(run_dir, config, sequences, target),
            str(run_dir.stage(CAPTURE)),
            capture.storage,
            {"fingerprint": run_dir.manifest()[CAPTURE]["fingerprint"]},
            token,
        ),
        batch_size=1,
        num_cpus=capture.cpus_per_target,
        num_gpus=capture.gpus_per_target or None,
        compute=ActorPoolStrategy(size=min(capture.targets, len(work))),
    )
    for block in stored.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for shard in block.to_pylist():
            progress.add(shard)


class Progress:
    """Counts shards as they come and says so every few seconds."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.started: float | None = None
        self._said = 0.0
        self.shards = self.tokens = self.bytes = self.set_aside = 0
        self.seconds = self.busy_s = self._prefill_s = 0.0

    def add(self, shard: dict[str, Any]) -> None:
        """Adds a shard that is committed."""
        now = time.monotonic()
        self.started = self.started or now - shard["seconds"]
        self.busy_s += shard["seconds"]
        self.shards += 1
        self.tokens += shard["tokens"]
        self.bytes += shard["bytes"]
        self.set_aside += shard["set_aside"]
        self._prefill_s += shard["prefill_seconds"]
        for reason in shard["reasons"]:
            sequence_id, _, why = reason.partition(" ")
            run_log.event("sequence set aside", logging.WARNING, sequence_id=sequence_id, reason=why)
        for note in shard["notes"]:
            kind, _, text = note.partition(" ")
            run_log.event(_EVENTS.get(kind, "warning"), logging.WARNING, text=text)
            say(text)
        self.seconds = now - self.started
        if now - self._said > _SAY_EVERY_S or self.shards == len(self._plan.missing):
            self._said = now
            left = (self._plan.missing_tokens - self.tokens) / max(self.tokens_per_second, 1e-9)
            say(
                f"{time.strftime('%H:%M:%S')} shards {self.shards}/{len(self._plan.missing)} | "
                f"{self.tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s ({self.prefill_share:.0%} of bare "
                f"prefill) | {self.bytes / 1e9:.2f} GB | set aside {self.set_aside} | ETA {left / 60:.0f} min",
            )

    @property
    def prefill_share(self) -> float:
        """The speed of capturing, its checks and writing included, over that of the target's prefill alone."""
        return self._prefill_s / self.busy_s if self.busy_s else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def _summarise(
    run_dir: RunDir,
    capture: Capture,
    sequences: Corpus,
    target: TargetFiles,
    progress: Progress,
    stopped_by: str | None,
    started: float,
) -> dict[str, Any]:
    """Counts the cache itself."""
    plan = Plan.make(run_dir, capture, sequences, target)
    there = [shard for shard in plan.shards if shard not in plan.missing]
    folder = run_dir.stage(CAPTURE)
    rows = sum(len(about(folder / "shards" / f"{shard.name}.parquet")["rows"]) for shard in there)
    seen = sum(len(shard.rows) for shard in there)
    reasons, quantiles = _scores(folder / "scores", there)
    warnings = []
    if damaged := corpus.damaged(sequences):
        warnings.append(f"{len(damaged)} generated sequences are damaged and were left out, e.g. {damaged[0]}")
    if seen and (seen - rows) / seen > 0.02:
        warnings.append(f"{(seen - rows) / seen:.1%} of the sequences are not the target's own; see the reasons")
    return {
        "stage": CAPTURE,
        "status": "complete" if not plan.missing else "stopped" if stopped_by else "incomplete",
        "expected": len(sequences),
        "rows": rows,
        "quarantined": seen - rows,
        "missing": len(sequences) - seen,
        "tokens": plan.tokens - plan.missing_tokens,
        "tokens_per_second": round(progress.tokens_per_second, 1),
        "prefill_share": round(progress.prefill_share, 3),
        "bytes_per_token": plan.bytes_per_token,
        "bytes": sum((folder / "shards" / f"{shard.name}.parquet").stat().st_size for shard in there),
        "on_policy_difference": quantiles,
        "limit": asdict(getattr(_limits(run_dir), _dtype(capture))),
        "quarantined_by_reason": reasons,
        "wall_s": round(time.monotonic() - started, 1),
        "start_up_s": None if progress.started is None else round(progress.started - started, 1),
        "busy_s": round(progress.busy_s / max(1, min(capture.targets, progress.shards)), 1),
        "run_dir": str(run_dir.path),
        "stopped_by": stopped_by,
        "warnings": warnings,
    }


def _scores(folder: Path, there: list[Shard]) -> tuple[dict[str, int], dict[str, float]]:
    """Reasons for setting aside, and the median and upper quantiles of the difference to the recorded answers."""
    files = [folder / f"{shard.name}.parquet" for shard in there]
    if not files:
        return {}, {}
    table = pa.concat_tables(map(read_scores, files))
    reasons = dict(Counter(map(kind_of, table["reason"].drop_null().to_pylist())).most_common())
    differences = table["mean_difference"].drop_null().to_numpy()
    if not len(differences):
        return reasons, {}
    p50, p99, most = np.quantile(differences, [0.5, 0.99, 1.0])
    return reasons, {"p50": float(p50), "p99": float(p99), "max": float(most)}
