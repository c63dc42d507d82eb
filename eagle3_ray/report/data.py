"""Data quality of a run: the generated answers and the on-policy check of the capture stage, as counts and histograms.

Rows stay in their Parquet files: DuckDB counts them there, and only a handful of rejected answers is read as examples.
Text appears here and nowhere else in a run: examples are decoded with special tokens visible.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_ray.audit import VARYING
from eagle3_ray.ledger import Ledger, select
from eagle3_ray.records import REJECTED, SEQUENCES
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import CAPTURE, GENERATE, RunDir, RunError
from eagle3_ray.target.files import TargetError, resolve

_BINS = 24
_SMALLEST = 1e-8  # differences under it are rounding of the float32 that they are stored in
_REASONS = 6  # kinds of rejection that are shown with examples,
_EXAMPLES = 2  # and so many of each
_PROMPT_TAIL, _ANSWER_HEAD, _ANSWER_TAIL = 60, 80, 60  # tokens of an example
_MEMORY: dict[str, Any] = {"memory_limit": "1GB"}
_LEAST_FILES = 8  # fewer committed files are no curve

_LENGTHS = """
SELECT partition, least(len(output_ids) // $width, $last)::INT AS bin,
       count(*) FILTER (finish_reason IS DISTINCT FROM 'length') AS stopped,
       count(*) FILTER (finish_reason = 'length') AS cut
FROM read_parquet($files) GROUP BY ALL ORDER BY ALL
"""
_LATENCY = """
SELECT quantile_disc(latency_s, [0.5, 0.9, 0.99, 1.0]), count(*) FILTER (attempts > 1) FROM read_parquet($files)
WHERE latency_s IS NOT NULL
"""
_ENDPOINTS = """
SELECT endpoint, count(*) AS rows, sum(len(output_ids))::BIGINT AS output_tokens,
       round(median(latency_s), 2) AS median_s
FROM read_parquet($files) WHERE endpoint IS NOT NULL GROUP BY endpoint ORDER BY endpoint
"""
_FILES = """
SELECT filename, sum(len(output_ids))::BIGINT FROM read_parquet($files, filename = true) GROUP BY filename
"""
_OF_KIND = """
SELECT reason, partition, prompt_id, turn, finish_reason, prompt_ids, output_ids FROM read_parquet($files)
WHERE regexp_replace(reason, $varying, 'N', 'g') = $kind ORDER BY sequence_id LIMIT $limit
"""


def generated(run: RunDir) -> dict[str, Any] | None:
    """The generate stage: counts, lengths and ends, speed, rejections with examples. None before it ran."""
    entry = run.manifest().get(GENERATE)
    if entry is None:
        return None
    import duckdb

    config = entry.get("config", {})
    ledger, summary = Ledger(run), run.summary(GENERATE) or {}
    sequences, rejected = ledger.files(SEQUENCES), ledger.files(REJECTED)
    counts = ledger.count(config.get("audit", {}).get("boundary_ids", []))
    found: dict[str, Any] = {
        "status": state_of(run, GENERATE),
        "model": config.get("target", {}).get("model"),
        "sampling": {k: entry["fingerprint"].get(f"generate.{k}") for k in ("temperature", "top_p", "max_new_tokens")},
        "expected": summary.get("expected"),
        "rows": counts["rows"],
        "rejected": counts["rejected"],
        "output_tokens": counts["output_tokens"],
        "partitions": counts["partitions"],
        "lengths": None,
        "latency_s": None,
        "endpoints": [],
        "speed": _speed(summary),
        "rejections": [],
        "special_tokens": [],
        "examples_missing_because": None,
        "warnings": list(summary.get("warnings", [])),
        "stopped_by": summary.get("stopped_by"),
    }
    with ledger.asked(f"A file in {ledger.rows}"), duckdb.connect(config=_MEMORY) as db:
        if sequences:
            found["lengths"] = _lengths(db, sequences)
            found["latency_s"] = _latency(db, sequences)
            found["endpoints"] = select(db, _ENDPOINTS, {"files": sequences})
            by_file = db.execute(_FILES, {"files": sequences}).fetchall()
            written = [(Path(file).stat().st_mtime, tokens) for file, tokens in by_file]
            found["speed"]["over_time"] = over_time(written, summary.get("servers_best_tokens_per_second"))
        if rejected:
            found |= _rejections(db, rejected, counts["reasons"], config.get("target", {}))
    return found


def captured(run: RunDir) -> dict[str, Any] | None:
    """The capture stage: what is stored, and how far each answer is from what the target says of it now."""
    if CAPTURE not in run.manifest():
        return None
    import duckdb

    summary = run.summary(CAPTURE) or {}
    names = ("expected", "rows", "quarantined", "tokens", "tokens_per_second", "bytes", "bytes_per_token")
    found: dict[str, Any] = {
        "status": state_of(run, CAPTURE),
        **{name: summary.get(name) for name in names},
        "by_reason": summary.get("quarantined_by_reason", {}),
        "limit": summary.get("limit"),
        "scores": None,
        "warnings": list(summary.get("warnings", [])),
        "stopped_by": summary.get("stopped_by"),
    }
    files = sorted(str(path) for path in (run.stage(CAPTURE) / "scores").glob("*.parquet"))
    if files:
        try:
            with duckdb.connect(config=_MEMORY) as db:
                found["scores"] = {
                    "mean_difference": _histogram(db, files, "mean_difference", log=True),
                    "argmax_agreement": _histogram(db, files, "argmax_agreement"),
                }
        except duckdb.Error as error:
            raise RunError(
                f"A file in {Path(files[0]).parent} is damaged ({str(error).splitlines()[0]}). Run jobs/capture.py "
                "again: it captures the sequences of that file anew."
            ) from None
    return found


def state_of(run: RunDir, stage: str) -> str:
    """What the last job made of a stage; a summary that says complete may be of the job before a killed one."""
    if run.succeeded(stage):
        return "complete"
    status = str((run.summary(stage) or {}).get("status", "not complete"))
    return "not complete" if status == "complete" else status


def _lengths(db: Any, files: list[str]) -> dict[str, Any]:
    """Answer lengths by partition in bins of one width: how many stopped by themselves, how many were cut."""
    longest = db.execute("SELECT max(len(output_ids)) FROM read_parquet($1)", [files]).fetchone()[0]
    width = max(1, -(-(longest + 1) // _BINS))
    bins = longest // width + 1
    partitions: dict[str, dict[str, list[int]]] = {}
    for partition, place, stopped, cut in db.execute(
        _LENGTHS, {"files": files, "width": width, "last": bins - 1}
    ).fetchall():
        counts = partitions.setdefault(partition, {"stopped": [0] * bins, "cut": [0] * bins})
        counts["stopped"][place], counts["cut"][place] = stopped, cut
    return {"edges": [i * width for i in range(bins + 1)], "partitions": partitions}


def _latency(db: Any, files: list[str]) -> dict[str, Any] | None:
    quantiles, again = db.execute(_LATENCY, {"files": files}).fetchone()
    if quantiles is None:
        return None
    return {
        **dict(zip(("p50", "p90", "p99", "max"), (round(q, 2) for q in quantiles), strict=True)),
        "answered_at_a_later_attempt": again,
        "histogram": _histogram(db, files, "latency_s"),
    }


def _histogram(db: Any, files: Sequence[str], column: str, log: bool = False) -> dict[str, Any] | None:
    """Counts of a column in bins of one width, or of one ratio (`log`), its median, 99th percentile and extremes.

    None without values. Values under the first edge of a `log` histogram count in its first bin.
    """
    low, high, p50, p99 = db.execute(
        f"SELECT min({column}), max({column}), quantile_disc({column}, 0.5), quantile_disc({column}, 0.99) "
        f"FROM read_parquet($1) WHERE isfinite({column})",
        [list(files)],
    ).fetchone()
    if low is None:
        return None
    first, last = (math.log10(max(low, _SMALLEST)), math.log10(max(high, _SMALLEST))) if log else (low, high)
    width = (last - first) / _BINS or 1.0
    value = f"log10(greatest({column}, {_SMALLEST}))" if log else column
    counts = [0] * _BINS
    for place, count in db.execute(
        f"SELECT greatest(least(floor(({value} - $first) / $width), {_BINS - 1}), 0)::INT, count(*) "
        f"FROM read_parquet($files) WHERE isfinite({column}) GROUP BY 1",
        {"first": first, "width": width, "files": list(files)},
    ).fetchall():
        counts[place] = count
    edges = [first + i * width for i in range(_BINS + 1)]
    return {
        "edges": [10**edge for edge in edges] if log else edges,
        "counts": counts,
        "p50": p50,
        "p99": p99,
        "min": low,
        "max": high,
    }


def _speed(summary: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s of the last job, held against what the servers showed at their best."""
    mean, best = summary.get("tokens_per_second"), summary.get("servers_best_tokens_per_second")
    return {
        "tokens_per_second": mean,
        "servers_best_tokens_per_second": best,
        "share": round(mean / best, 4) if mean and best else None,
        "wall_s": summary.get("wall_s"),
        "retries": summary.get("retries", {}),
        "over_time": None,
    }


def over_time(written: Sequence[tuple[float, int]], best: float | None) -> dict[str, Any] | None:
    """Answer tokens/s by minutes since the first file, from the time at which each file was written and its tokens.

    None where that says nothing: a few files, or a run that was copied (all files written faster than servers answer).
    """
    if len(written) < _LEAST_FILES:
        return None
    (start, _), *later = sorted(written)  # the first file's tokens came before its time
    end = later[-1][0]
    if end <= start or (best and sum(tokens for _, tokens in later) / (end - start) > 2 * best):
        return None
    bins = min(2 * _BINS, len(written) // 2)
    width = (end - start) / bins
    sums = [0] * bins
    for moment, tokens in later:
        sums[min(int((moment - start) / width), bins - 1)] += tokens
    return {
        "minutes": [round((i + 1) * width / 60, 3) for i in range(bins)],
        "tokens_per_second": [round(tokens / width, 1) for tokens in sums],
    }


def _rejections(db: Any, files: list[str], kinds: dict[str, int], target: dict[str, Any]) -> dict[str, Any]:
    """Kinds of rejection with their rows, the most frequent ones with examples."""
    renderer, missing = _renderer(target)
    rejections: list[dict[str, Any]] = [{"kind": kind, "rows": rows} for kind, rows in kinds.items()]
    for kind in rejections[:_REASONS]:
        wanted = {"files": files, "varying": VARYING, "kind": kind["kind"], "limit": _EXAMPLES}
        kind["examples"] = [_example(row, renderer) for row in select(db, _OF_KIND, wanted)]
    return {
        "rejections": rejections,
        "special_tokens": renderer.special_tokens if renderer else [],
        "examples_missing_because": missing,
    }


class _Decoder:
    """Ids as text for people, special tokens visible."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.special_tokens = sorted({renderer.text([token]) for token in renderer.special_ids})

    def excerpt(self, ids: Sequence[int], head: int, tail: int) -> str:
        """The first `head` and the last `tail` tokens."""
        if len(ids) <= head + tail:
            return self._renderer.text(ids)
        if not head:
            return "… " + self._renderer.text(ids[-tail:])
        left_out = f"\n[… {len(ids) - head - tail:,} tokens left out …]\n"
        return self._renderer.text(ids[:head]) + left_out + self._renderer.text(ids[-tail:])


def _renderer(target: dict[str, Any]) -> tuple[_Decoder | None, str | None]:
    """The target's tokenizer, or why there is none on this machine."""
    try:
        folder = resolve(target["model"]).folder
        return _Decoder(Renderer(folder, trust_remote_code=target.get("trust_remote_code", False))), None
    except KeyError:
        return None, "the manifest names no target model"
    except (ImportError, OSError, ValueError, TargetError) as error:
        return None, f"the target's tokenizer cannot be loaded: {str(error).splitlines()[0]}"


def _example(row: dict[str, Any], decoder: _Decoder | None) -> dict[str, Any]:
    prompt, answer = row.pop("prompt_ids") or [], row.pop("output_ids") or []
    return {
        **row,
        "prompt_tokens": len(prompt),
        "output_tokens": len(answer),
        "prompt": decoder.excerpt(prompt, 0, _PROMPT_TAIL) if decoder and prompt else None,
        "answer": decoder.excerpt(answer, _ANSWER_HEAD, _ANSWER_TAIL) if decoder and answer else None,
    }
