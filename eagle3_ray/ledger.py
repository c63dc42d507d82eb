"""What a generate run holds, counted from the data itself and from nothing else."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3_ray.audit import report
from eagle3_ray.records import REJECTED, SEQUENCES
from eagle3_ray.runs import RunDir

STAGE = "generate"


class Ledger:
    """The rows of a run's generate stage. Small enough to travel to a Ray task, which does the counting."""

    def __init__(self, run_dir: RunDir) -> None:
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

    def by_partition(self) -> dict[str, int]:
        """Committed rows of each partition, sequences and rejected ones together."""
        counts: dict[str, int] = {}
        for file in self.files():
            for name in pq.read_table(file, columns=["partition"])["partition"].to_pylist():
                counts[name] = counts.get(name, 0) + 1
        return counts

    def count(self, boundary_ids: list[int]) -> dict[str, Any]:
        """Rows, tokens, reasons, and how many sequence ids stand in more than one row (which must be none)."""
        import duckdb

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
                    "SELECT regexp_replace(reason, '[0-9]+', 'N', 'g') AS kind, count(*) FROM read_parquet($1) "
                    "GROUP BY kind ORDER BY 2 DESC, 1",
                    [rejected],
                ).fetchall()
        return {
            "rows": sum(p["rows"] for p in partitions),
            "output_tokens": sum(p["output_tokens"] for p in partitions),
            "rejected": sum(count for _, count in reasons),
            "repeated": repeated[0][0],
            "reasons": dict(reasons[:20]),
            "partitions": partitions,
        }
