"""What a generate run holds, counted from the data itself and from nothing else."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.audit import VARYING, report
from eagle3_ray.records import REJECTED, SEQUENCES
from eagle3_ray.runs import RunDir, RunError

STAGE = "generate"


class Ledger:
    """The rows of a run's generate stage. Small enough to travel to a Ray task, which does the counting."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir.path
        self.stage = run_dir.stage(STAGE)

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
            try:
                pq.read_metadata(file)
            except (OSError, pa.ArrowException) as error:
                raise self.damage(file, error) from None

    def damage(self, file: str | Path, error: Exception) -> RunError:
        """What to say, and to do, about a file that cannot be read."""
        return RunError(
            f"{file} is damaged ({str(error).splitlines()[0]}). Set the stage aside with `python jobs/doctor.py "
            f"{self._run} --quarantine {STAGE}` and generate again."
        )

    def by_partition(self) -> dict[str, int]:
        """Committed rows of each partition, sequences and rejected ones together. Raises RunError: a damaged file."""
        counts: dict[str, int] = {}
        for file in self.files():
            try:
                names = pq.read_table(file, columns=["partition"])["partition"].to_pylist()
            except (OSError, pa.ArrowException) as error:
                raise self.damage(file, error) from None
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        return counts

    def count(self, boundary_ids: list[int]) -> dict[str, Any]:
        """Rows, tokens, reasons, and how many sequence ids stand in more than one row (which must be none).

        Raises:
            RunError: a file is damaged.
        """
        import duckdb

        try:
            return self._count(duckdb, boundary_ids)
        except duckdb.Error as error:
            raise self.damage(f"A file in {self.rows}", error) from None

    def _count(self, duckdb: Any, boundary_ids: list[int]) -> dict[str, Any]:
        sequences, rejected = self.files(SEQUENCES), self.files(REJECTED)
        with duckdb.connect(config={"memory_limit": "1GB"}) as db:
            partitions = report(db, sequences, boundary_ids)
            repeated, reasons = [(0,)], []
            if sequences or rejected:
                repeated = db.execute(
                    "SELECT count(*) - count(DISTINCT sequence_id) FROM read_parquet($1)", [sequences + rejected]
                ).fetchall()
            if rejected:
                reasons = db.execute(
                    "SELECT regexp_replace(reason, $2, 'N', 'g') AS kind, count(*) FROM read_parquet($1) "
                    "GROUP BY kind ORDER BY 2 DESC, 1",
                    [rejected, VARYING],
                ).fetchall()
        return {
            "rows": sum(p["rows"] for p in partitions),
            "output_tokens": sum(p["output_tokens"] for p in partitions),
            "rejected": sum(count for _, count in reasons),
            "repeated": repeated[0][0],
            "reasons": dict(reasons),
            "partitions": partitions,
        }
