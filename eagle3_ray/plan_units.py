"""Which rendered prompts become units of the plan: no duplicates, within the caps, in an order by hash.

DuckDB does it over Parquet and spills to disk, so that any number of prompts fits.
"""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.runs import RunError

PART_SCHEMA = pa.schema(
    [
        ("partition", pa.string()),
        ("prompt_id", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),  # of the first turn
        ("conversation", pa.string()),  # JSON of turns, tools, template options; null for one turn without tools
        ("turns", pa.int32()),
        ("content_sha", pa.string()),  # of all that decides the prompts; null for bad rows
        ("reason", pa.string()),
    ]
)
"""A rendered prompt, or a bad row with its reason."""

UNIT_SCHEMA = pa.schema(
    [
        ("unit", pa.int64()),
        ("partition", pa.string()),
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("conversation", pa.string()),
        ("turns", pa.int32()),
        ("reason", pa.string()),
    ]
)
"""A row of the plan's units: a prompt and a sample, all turns; or a bad row with its reason."""
_ROWS_PER_FILE = 8192
ROWS_PER_GROUP = 64
"""Units in a row group of the plan's files: the least that a generating task works on."""

_NARROW = """
CREATE TEMP TABLE narrow AS
SELECT partition, prompt_id, file, line, turns, len(prompt_ids) AS tokens, content_sha,
       md5_number_lower(partition || chr(0) || prompt_id) AS rank
FROM read_parquet($parts) WHERE reason IS NULL
"""

_FATES = """
CREATE TEMP TABLE fates AS
WITH copies AS (
    SELECT *, row_number() OVER (PARTITION BY content_sha ORDER BY partition, file, line) AS copy FROM narrow
), named AS (
    SELECT *, row_number() OVER (PARTITION BY partition, prompt_id ORDER BY file, line) AS namesake
    FROM copies WHERE NOT ($dedupe AND copy > 1)
), placed AS (
    SELECT *, row_number() OVER mine AS place, sum(tokens) OVER mine AS tokens_so_far
    FROM named WHERE namesake = 1 WINDOW mine AS (PARTITION BY partition ORDER BY rank, file, line)
)
SELECT file, line, CASE WHEN place <= $limit AND tokens_so_far <= $max_tokens THEN 'chosen' ELSE 'over_cap' END AS fate
FROM placed
UNION ALL SELECT file, line, 'namesake' FROM named WHERE namesake > 1
UNION ALL SELECT file, line, 'duplicate' FROM copies WHERE $dedupe AND copy > 1
"""

_UNITS = """
WITH rows AS (
    SELECT p.* EXCLUDE (reason), coalesce(fate, 'bad') AS fate,
           CASE fate WHEN 'namesake' THEN 'the id ''' || prompt_id || ''' stands in this partition more than once'
                     ELSE reason END AS reason
    FROM read_parquet($parts) p LEFT JOIN fates f ON p.file = f.file AND p.line = f.line
    WHERE coalesce(fate, 'bad') IN ('chosen', 'namesake', 'bad')
), sampled AS (
    SELECT *, unnest(range(CASE fate WHEN 'chosen' THEN $samples ELSE 1 END)) AS sample_index FROM rows
), identified AS (
    SELECT * EXCLUDE (fate, prompt_id, turns),
        CASE fate WHEN 'chosen' THEN prompt_id ELSE file || ':' || line END AS prompt_id,
        CASE fate WHEN 'chosen' THEN turns ELSE 1 END AS turns
    FROM sampled
)
SELECT (md5_number_lower(concat_ws(chr(0), partition, prompt_id, sample_index, content_sha, reason)) >> 1)::BIGINT
       AS unit, partition, prompt_id, sample_index::INTEGER AS sample_index, file, line,
       prompt_ids, conversation, turns, reason
FROM identified ORDER BY md5_number_lower(partition || chr(0) || prompt_id), sample_index
"""

_COUNTS = """
SELECT p.partition,
       count(*) AS read,
       count(*) FILTER (fate = 'duplicate') AS duplicates,
       count(*) FILTER (fate = 'over_cap') AS over_cap,
       count(*) FILTER (fate IS NULL OR fate = 'namesake') AS bad,
       count(*) FILTER (fate = 'chosen') AS prompts,
       coalesce(sum(turns) FILTER (fate = 'chosen'), 0)::BIGINT * $samples + bad AS expected,
       coalesce(sum(len(prompt_ids)) FILTER (fate = 'chosen'), 0)::BIGINT * $samples AS prompt_tokens,
       coalesce(max(len(prompt_ids)) FILTER (fate = 'chosen'), 0) AS longest_prompt
FROM read_parquet($parts) p LEFT JOIN fates f ON p.file = f.file AND p.line = f.line
GROUP BY p.partition ORDER BY p.partition
"""


def choose(
    folder: Path,
    answered: list[str],
    *,
    dedupe: bool,
    limit: int | None,
    max_tokens_total: int | None,
    samples_per_prompt: int,
) -> list[dict[str, Any]]:
    """Chooses from `folder`/parts, writes `folder`/units and returns the counts of each partition.

    `answered` are the Parquet files of rows that the run has already. Runs as a Ray task: the driver's memory is small.

    Raises:
        RunError: rows that were answered already have no place among the units.
    """
    import duckdb

    parts, unlimited = str(folder / "parts" / "*.parquet"), 2**62
    if not any((folder / "parts").glob("*.parquet")):  # Ray writes no file for no rows
        (folder / "parts").mkdir(exist_ok=True)
        pq.write_table(PART_SCHEMA.empty_table(), folder / "parts" / "none.parquet")
    with duckdb.connect(config={"memory_limit": "1GB", "temp_directory": str(folder / "spill")}) as db:
        db.execute(_NARROW, {"parts": parts})
        db.execute(
            _FATES,
            {
                "dedupe": dedupe,
                "limit": limit or unlimited,
                "max_tokens": max_tokens_total or unlimited,
            },
        )
        for_parts = {"parts": parts, "samples": samples_per_prompt}
        units = db.sql(_UNITS, params=for_parts).to_arrow_reader(_ROWS_PER_FILE)  # streams; execute() would copy
        shutil.rmtree(folder / "units", ignore_errors=True)  # of a worker that was killed here
        (folder / "units").mkdir()
        pq.write_table(units.schema.empty_table(), folder / "units" / "000000.parquet")  # stays where nothing is chosen
        for number, batch in enumerate(units):
            pq.write_table(
                pa.Table.from_batches([batch]),
                folder / "units" / f"{number:06}.parquet",
                compression="zstd",
                row_group_size=ROWS_PER_GROUP,
                write_page_checksum=True,
            )
        new = str(folder / "units" / "*.parquet")
        _refuse_lost_rows(db, new, answered)
        cursor = db.execute(_COUNTS, for_parts)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _refuse_lost_rows(db: Any, units: str, rows: list[str]) -> None:
    twice = db.execute("SELECT count(*) - count(DISTINCT unit) FROM read_parquet($1)", [units]).fetchone()[0]
    if twice:
        raise RunError(f"{twice} units of the plan share a hash with another one; rename a partition.")
    if not rows:
        return
    lost = db.execute(
        "SELECT partition, prompt_id FROM read_parquet($1) "
        "WHERE unit NOT IN (SELECT unit FROM read_parquet($2)) LIMIT 3",
        [rows, units],
    ).fetchall()
    if lost:
        examples = ", ".join(f"{partition}/{prompt_id}" for partition, prompt_id in lost)
        raise RunError(
            f"The run has answers to prompts that these settings do not select or that have changed ({examples}). "
            "Larger caps and partitions of other prompts extend a run; for anything else use another run.dir."
        )
