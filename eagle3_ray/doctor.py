"""The state of a run directory in a screenful: what is there, what is wrong, what to run next, and how it reads."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from eagle3_ray import plan
from eagle3_ray.ledger import Ledger
from eagle3_ray.records import REJECTED, SEQUENCES, token_sha
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import CAPTURE, EVALUATE, GENERATE, TRAIN, RunDir, RunError, WriterLock
from eagle3_ray.states_cache import DamagedShard, about
from eagle3_ray.target.files import resolve

_SAMPLE_TOKENS = 60
_KINDS = 20  # of rejection, the most frequent
_LATER = {
    CAPTURE: ("rows", "quarantined", "tokens", "bytes"),
    TRAIN: ("steps", "loss", "chain_acceptance_length", "drafter_dir"),
    EVALUATE: ("best_drafter", "acceptance_length"),
}
"""Stages behind generate, and what of their summaries tells most."""


def describe(run: RunDir) -> str:
    """Stages, counts, fingerprint, problems, a sample with special tokens visible, and the next command.

    Raises:
        RunError: there is no run at that path.
    """
    manifest = run.manifest()
    failed = [f"  PROBLEM: {failure}"] if (failure := run.last_job_failed()) else []
    if GENERATE not in manifest and failed:
        return "\n".join([f"{run.path}", *failed])
    if GENERATE not in manifest:
        raise RunError(f"{run.path} holds no run (no manifest.json with a stage). Start one with jobs/generate.py.")
    entry = manifest[GENERATE]
    ledger = Ledger(run)
    try:
        ledger.check()
    except RunError as damage:
        return "\n".join([f"{run.path}", *failed, f"  PROBLEM: {damage}"])
    known = plan.load(run.stage(GENERATE) / "plan")
    counts = ledger.count(entry["config"]["audit"]["boundary_ids"])
    expected = known[0].expected if known else 0
    missing = expected - counts["rows"] - counts["rejected"]
    state = _state(run, run.succeeded(GENERATE) and not missing)
    lines = [
        f"{run.path}",
        *failed,
        f"generate: {state}, {counts['rows']:,} sequences + {counts['rejected']:,} rejected of {expected:,} rows, "
        f"{counts['output_tokens']:,} answer tokens",
        f"  data        {ledger.rows / SEQUENCES}",
        f"  target      {entry['config']['target']['model']}",
        f"  fingerprint {_short(entry['fingerprint'])}",
        f"  started     {entry['starts']} times, last {entry['last_start']}",
        f"  {'partition':24}{'rows':>9}{'tokens':>12}{'mean':>8}{'p50/p90/p99':>16}{'truncated':>11}{'boundary':>10}",
    ]
    for p in counts["partitions"]:
        quantiles = "/".join(str(q) for q in p["token_quantiles"])
        lines.append(
            f"  {p['partition']:24}{p['rows']:>9,}{p['output_tokens']:>12,}{p['mean_tokens']:>8}{quantiles:>16}"
            f"{p['truncated_share']:>11.1%}{p['boundary_share']:>10.1%}"
        )
    lines += [f"  rejected: {count:,} x {reason}" for reason, count in list(counts["reasons"].items())[:_KINDS]]
    lines += [f"  PROBLEM: {problem}" for problem in _problems(run, ledger, entry, counts)]
    lines += _sample(ledger, entry["config"])
    lines += _later_stages(run, manifest)
    if missing and state == "not complete":
        lines.append(f"next: {missing:,} rows are to come; go on with\n  {entry['command']}")
    return "\n".join(lines)


def _state(run: RunDir, complete: bool) -> str:
    return "complete" if complete else "a job is writing" if WriterLock.is_held(run) else "not complete"


def _later_stages(run: RunDir, manifest: dict[str, Any]) -> Iterator[str]:
    """A line for each stage that ran behind the generate stage, and what is wrong with it."""
    for stage, keys in _LATER.items():
        summary = run.summary(stage)
        if stage not in manifest and summary is None:
            continue
        told = summary or {}
        facts = ", ".join(f"{key} {told[key]}" for key in keys if told.get(key) is not None)
        yield f"{stage}: {_state(run, run.succeeded(stage))}{', ' + facts if facts else ''}"
        if told.get("stopped_by") and not run.succeeded(stage):
            yield f"  PROBLEM: the last job stopped: {told['stopped_by']}"
        for warning in told.get("warnings", ()):
            yield f"  PROBLEM: {warning}"
    for shard in sorted((run.stage(CAPTURE) / "shards").glob("*.parquet")):
        try:
            about(shard)
        except DamagedShard as damage:
            yield f"  PROBLEM: {damage}"


def _problems(run: RunDir, ledger: Ledger, entry: dict[str, Any], counts: dict[str, Any]) -> Iterator[str]:
    if counts["repeated"]:
        yield f"{counts['repeated']} sequence ids stand in more than one row; set the stage aside (--quarantine)"
    wrong_sha = 0
    for folder in (SEQUENCES, REJECTED):
        for file in ledger.files(folder):
            stored = pq.read_schema(file).metadata or {}
            if json.loads(stored.get(b"eagle3_ray.fingerprint", b"{}")) != entry["fingerprint"]:
                yield f"{file} was made with other settings than the manifest says; move it out of the run"
            try:
                with ledger.reading(file):
                    rows = pq.read_table(file, columns=["prompt_ids", "output_ids", "token_sha"]).to_pylist()
            except RunError as damage:
                yield str(damage)
                continue
            for row in rows:
                wrong_sha += token_sha(row["prompt_ids"], row["output_ids"]) != row["token_sha"]
    if wrong_sha:
        yield f"{wrong_sha} rows are not the tokens that were generated (token_sha); set the stage aside (--quarantine)"
    pending = len(list(ledger.checkpoint.glob("*.pending.parquet")))
    if pending and not WriterLock.is_held(run):
        yield f"{pending} files were being written when a job ended; the next job writes them anew"
    summary = run.summary(GENERATE)
    if summary and not run.succeeded(GENERATE):
        if summary["stopped_by"]:
            yield f"the last job stopped: {summary['stopped_by']}"
        if summary["last_failure"]:
            yield f"the last failed row was {summary['last_failure']}"


def _sample(ledger: Ledger, config: dict[str, Any]) -> Iterator[str]:
    files = ledger.files(SEQUENCES) + ledger.files(REJECTED)
    if not files:
        return
    row = next(pq.ParquetFile(files[0]).iter_batches(batch_size=1)).to_pylist()[0]
    target = config["target"]
    try:
        renderer = Renderer(resolve(target["model"]).folder, trust_remote_code=target["trust_remote_code"])
    except (ImportError, OSError, ValueError) as error:
        yield f"  no sample: the target's tokenizer cannot be loaded ({error})"
        return
    yield f"  sample {row['partition']}/{row['prompt_id']}, turn {row['turn']}, as the target saw and wrote it:"
    yield f"    {renderer.text(row['prompt_ids'][-_SAMPLE_TOKENS:])!r}"
    answer = row["output_ids"]
    cut = " ... " if len(answer) > 2 * _SAMPLE_TOKENS else ""
    end = answer[max(_SAMPLE_TOKENS, len(answer) - _SAMPLE_TOKENS) :]
    yield f"    -> {renderer.text(answer[:_SAMPLE_TOKENS]) + cut + renderer.text(end)!r}"
    yield f"    {len(row['prompt_ids'])} + {len(answer)} tokens, finish {row['finish_reason']}"


def _short(fingerprint: dict[str, Any]) -> str:
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in fingerprint.items() if value is not None)
