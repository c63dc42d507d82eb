"""Makes a run whose generate stage is complete, from given sequences, as the generate job leaves it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.records import SEQUENCE_SCHEMA, sequence_id, token_sha
from eagle3_ray.runs import RunDir


def sequence(
    prompt_id: str,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    partition: str = "p",
    sample_index: int = 0,
    turn: int = 0,
) -> dict[str, Any]:
    """A row of `sequences/`."""
    return {
        "sequence_id": sequence_id(partition, prompt_id, turn, sample_index),
        "partition": partition,
        "prompt_id": prompt_id,
        "turn": turn,
        "sample_index": sample_index,
        "prompt_ids": list(prompt_ids),
        "output_ids": list(output_ids),
        "output_logprobs": None if logprobs is None else list(logprobs),
        "token_sha": token_sha(prompt_ids, output_ids),
    }


def make_run(path: Path, rows: Sequence[dict[str, Any]], fingerprint: dict[str, Any] | None = None) -> RunDir:
    """Writes the rows in two files, the manifest and the mark of success."""
    run = RunDir(path)
    folder = run.stage("generate") / "rows" / "sequences"
    folder.mkdir(parents=True)
    half = (len(rows) + 1) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        if part:
            pq.write_table(pa.Table.from_pylist(list(part), schema=SEQUENCE_SCHEMA), folder / f"{number}.parquet")
    run.claim("generate", fingerprint or {"generate.temperature": 0.0}, {"command": "python jobs/generate.py"})
    run.succeed("generate", "plan")
    return run
