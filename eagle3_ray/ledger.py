"""What a generate run holds, counted from the data itself and from nothing else."""

import errno
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.audit import VARYING
from eagle3_ray.records import REJECTED, SEQUENCES
from eagle3_ray.runs import GENERATE, RunDir, RunError

_REPORT = """
SELECT partition, count(*) AS rows, sum(len(output_ids))::BIGINT AS output_tokens,
       round(avg(len(output_ids)), 1) AS mean_tokens,
       quantile_disc(len(output_ids), [0.5, 0.9, 0.99]) AS token_quantiles,
       round(avg((finish_reason = 'length')::INT), 4) AS truncated_share,
       round(avg(list_has_any(output_ids, $boundary)::INT), 4) AS boundary_share
FROM read_parquet($files) GROUP BY partition ORDER BY partition
"""

_REASONS = """
SELECT regexp_replace(reason, $2, 'N', 'g') AS kind, count(*) FROM read_parquet($1) GROUP BY kind ORDER BY 2 DESC, 1
"""


_NO_ROOM = re.compile("no space left|could not write|failed to (write|create)|quota", re.IGNORECASE)
"""What DuckDB says where it cannot spill to the disk."""


class Ledger:
    """The rows of a run's generate stage. Small enough to travel to a Ray task, which does the counting."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir.path
        self.stage = run_dir.stage(GENERATE)

    @property
    def rows(self) -> Path:
        """The folder of sequences/ and rejected/."""
        return self.stage / "rows"

    @property
    def checkpoint(self) -> Path:
        """Ray Data's folder of committed units."""
        return self.stage / "checkpoint"

    def files(self, folder: str = "*") -> list[str]:
        """Committed files of `folder`. A killed job leaves others, whose checkpoint is pending, to the next."""
        pending = tuple(p.name.removesuffix(".pending.parquet") for p in self.checkpoint.glob("*.pending.parquet"))
        files = sorted(self.rows.glob(f"{folder}/*.parquet"))
        return [str(file) for file in files if not (pending and file.name.startswith(pending))]

    def check(self) -> None:
        """Raises RunError where a committed file is no whole Parquet file."""
        for file in self.files():
            with self.reading(file):
                pq.read_metadata(file)

    @contextmanager
    def reading(self, file: str | Path) -> Iterator[None]:
        """Raises RunError, which says what to do, where the block finds the Parquet file damaged."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self.damage(file, error) from None

    def damage(self, file: str | Path, error: Exception) -> RunError:
        """What to say, and to do, about a file that cannot be read."""
        return RunError(
            f"{file} is damaged ({str(error).splitlines()[0]}). Set the stage aside with `python jobs/doctor.py "
            f"{self._run} --quarantine {GENERATE}` and generate again."
        )

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """For what DuckDB does with committed files.

        Raises:
            RunError: one of `what` is damaged.
            OSError: there is no room on the disk for what the memory does not hold.
        """
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            if isinstance(error, duckdb.OutOfMemoryException) or _NO_ROOM.search(said):
                raise OSError(errno.ENOSPC, said, str(self._run)) from None
            raise self.damage(what, error) from None

    def by_partition(self) -> dict[str, int]:
        """Committed rows of each partition, sequences and rejected ones together. Raises RunError: a damaged file."""
        counts: Counter[str] = Counter()
        for file in self.files():
            with self.reading(file):
                found = pq.read_table(file, columns=["partition"])["partition"].value_counts()
            counts.update({one["values"]: one["counts"] for one in found.to_pylist()})
        return counts

    def count(self, boundary_ids: list[int]) -> dict[str, Any]:
        """Rows, tokens, reasons, and how many sequence ids stand in more than one row (which must be none).

        Raises:
            RunError: a file is damaged.
        """
        import duckdb

        sequences, rejected = self.files(SEQUENCES), self.files(REJECTED)
        repeated, reasons = [(0,)], []
        memory: dict[str, Any] = {"memory_limit": "1GB", "temp_directory": str(self.stage / ".spill")}
        with self.asked(f"A file in {self.rows}"), duckdb.connect(config=memory) as db:
            partitions = report(db, sequences, boundary_ids)
            if sequences or rejected:
                repeated = db.execute(
                    "SELECT count(*) - count(DISTINCT sequence_id) FROM read_parquet($1)", [sequences + rejected]
                ).fetchall()
            if rejected:
                reasons = db.execute(_REASONS, [rejected, VARYING]).fetchall()
        return {
            "rows": sum(p["rows"] for p in partitions),
            "output_tokens": sum(p["output_tokens"] for p in partitions),
            "rejected": sum(count for _, count in reasons),
            "repeated": repeated[0][0],
            "reasons": dict(reasons),
            "partitions": partitions,
        }


def report(db: Any, files: list[str], boundary_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Per partition of stored sequences: rows, tokens, lengths (median, 90th and 99th percentile), shares."""
    return select(db, _REPORT, {"files": files, "boundary": sorted(boundary_ids) or [-1]}) if files else []


def select(db: Any, query: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that DuckDB finds, by the names of their columns."""
    result = db.execute(query, parameters)
    names = [column[0] for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
