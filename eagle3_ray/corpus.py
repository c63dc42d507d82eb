"""The generated sequences as one flat file of ids, so that any of them is read by its place.

Made once from the rows of a complete generate stage, in the order of `sequence_id`:

    RUN/corpus/ids.bin         int32, little-endian: prompt and answer of every sequence, one behind the other
    RUN/corpus/logprobs.bin    float32: log-probabilities of the answer tokens (NaN for prompts and where not recorded)
    RUN/corpus/index.parquet   a row per sequence: identity, where it begins, how long its prompt and all of it is
    RUN/corpus/corpus.json     the key of what it was made from, and its counts

A row whose ids do not hash to its `token_sha` is damaged: it is left out and named.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.ledger import STAGE as GENERATE
from eagle3_ray.ledger import Ledger
from eagle3_ray.records import SEQUENCES, token_sha
from eagle3_ray.runs import RunDir, RunError, write_json

_FOLDER = "corpus"
_INDEX_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("token_sha", pa.string()),
        ("partition", pa.string()),
        ("prompt_hash", pa.uint32()),  # equal for all turns and samples of a prompt
        ("start", pa.int64()),  # of the sequence in ids.bin and logprobs.bin, in tokens
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
    ]
)
_ROWS_AT_ONCE = 512
_READ = """
SELECT sequence_id, token_sha, partition, prompt_id, prompt_ids, output_ids, output_logprobs
FROM read_parquet($files) ORDER BY sequence_id
"""


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk. Small enough to travel to actors, which map its files into memory on first use."""

    folder: Path
    key: str

    @cached_property
    def _index(self) -> pa.Table:
        return pq.read_table(self.folder / "index.parquet")

    @cached_property
    def _ids(self) -> npt.NDArray[np.int32]:
        return _map(self.folder / "ids.bin", np.dtype("<i4"))

    @cached_property
    def _logprobs(self) -> npt.NDArray[np.float32]:
        return _map(self.folder / "logprobs.bin", np.dtype("<f4"))

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "key": self.key}

    def __len__(self) -> int:
        return int(self._index.num_rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the index as an array, by sequence."""
        return self._index[name].to_numpy()  # type: ignore[no-any-return]

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence, prompt and answer."""
        return self.column("tokens").astype(np.int64)

    @cached_property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence's prompt."""
        return self.column("prompt_tokens").astype(np.int64)

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return self.column("start")

    def sequence_id(self, row: int) -> str:
        return str(self._index["sequence_id"][row].as_py())

    def token_sha(self, row: int) -> str:
        return str(self._index["token_sha"][row].as_py())

    def ids(self, row: int) -> npt.NDArray[np.int32]:
        """The ids of a sequence [T], prompt and answer.

        Raises:
            RunError: they are not those that were generated (`token_sha`).
        """
        ids = self._slice(self._ids, row)
        prompt = int(self.prompt_tokens[row])
        if token_sha(ids[:prompt].tolist(), ids[prompt:].tolist()) != self.token_sha(row):
            raise RunError(
                f"{self.folder / 'ids.bin'} is damaged: sequence {self.sequence_id(row)} is not what was generated. "
                f"Delete the folder {self.folder}; the next job makes it again from the generated rows."
            )
        return ids

    def logprobs(self, row: int) -> npt.NDArray[np.float32] | None:
        """The recorded log-probabilities of the answer tokens [T - prompt_tokens], None where none were recorded."""
        logprobs = self._slice(self._logprobs, row)[self.prompt_tokens[row] :]
        return None if np.isnan(logprobs).any() else logprobs

    def heldout(self, share: float) -> npt.NDArray[np.bool_]:
        """Which sequences are kept for validation: by the hash of their prompt, so no prompt is on both sides."""
        return self.column("prompt_hash") < share * 2**32

    def answer_counts(self, rows: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each token id [vocab_size] is an answer token of these sequences."""
        counts = np.zeros(vocab_size, np.int64)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            answers = [self._slice(self._ids, row)[self.prompt_tokens[row] :] for row in some]
            counts += np.bincount(np.concatenate(answers), minlength=vocab_size)
        return counts

    def _slice(self, array: npt.NDArray[Any], row: int) -> npt.NDArray[Any]:
        start = self._starts[row]
        return array[start : start + self.tokens[row]]


def make(run_dir: RunDir) -> Corpus:
    """The corpus of a run, made where there is none for the rows that the run holds now.

    Raises:
        RunError: the generate stage is not complete, or holds no sequence that can be used.
    """
    if not run_dir.succeeded(GENERATE):
        raise RunError(f"{run_dir.path} has no complete generate stage; run jobs/generate.py with this run.dir first.")
    ledger, folder = Ledger(run_dir), run_dir.stage(_FOLDER)
    key = _key(run_dir, ledger)
    known = folder / "corpus.json"
    if not known.exists() or json.loads(known.read_text())["key"] != key:
        new = folder.with_name(f".{_FOLDER}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        _write(new, ledger.files(SEQUENCES), key)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
    corpus = Corpus(folder, key)
    if len(corpus) == 0:
        raise RunError(f"{run_dir.path} holds no sequence that can be used; see python jobs/doctor.py {run_dir.path}.")
    return corpus


def damaged(corpus: Corpus) -> list[str]:
    """Ids of the sequences that were left out, because their tokens are not those that were generated."""
    return list(json.loads((corpus.folder / "corpus.json").read_text())["damaged"])


def _key(run_dir: RunDir, ledger: Ledger) -> str:
    """Names what the corpus is made of: files are written once, so their names and sizes stand for their content."""
    digest = hashlib.sha256(json.dumps(run_dir.manifest()[GENERATE]["fingerprint"]).encode())
    for file in ledger.files(SEQUENCES):
        digest.update(f"{Path(file).name} {os.path.getsize(file)}\n".encode())
    return digest.hexdigest()[:16]


def _write(folder: Path, files: list[str], key: str) -> None:
    import duckdb

    start, wrong = 0, []
    with (
        duckdb.connect(config={"memory_limit": "2GB", "temp_directory": str(folder / "spill")}) as db,
        open(folder / "ids.bin", "wb") as ids_file,
        open(folder / "logprobs.bin", "wb") as logprobs_file,
        pq.ParquetWriter(folder / "index.parquet", _INDEX_SCHEMA) as index,
    ):
        batches = db.sql(_READ, params={"files": files}).to_arrow_reader(_ROWS_AT_ONCE) if files else ()
        for batch in batches:
            rows = []
            for row in batch.to_pylist():
                prompt, output = row["prompt_ids"], row["output_ids"]
                if token_sha(prompt, output) != row["token_sha"]:
                    wrong.append(row["sequence_id"])
                    continue
                logprobs = np.full(len(prompt) + len(output), np.nan, "<f4")
                if row["output_logprobs"] is not None:
                    logprobs[len(prompt) :] = row["output_logprobs"]
                ids_file.write(np.asarray(prompt + output, "<i4").tobytes())
                logprobs_file.write(logprobs.tobytes())
                rows.append(
                    {
                        "sequence_id": row["sequence_id"],
                        "token_sha": row["token_sha"],
                        "partition": row["partition"],
                        "prompt_hash": _prompt_hash(row["partition"], row["prompt_id"]),
                        "start": start,
                        "prompt_tokens": len(prompt),
                        "tokens": len(logprobs),
                    }
                )
                start += len(logprobs)
            index.write_table(pa.Table.from_pylist(rows, schema=_INDEX_SCHEMA))
    shutil.rmtree(folder / "spill", ignore_errors=True)
    write_json(folder / "corpus.json", {"key": key, "tokens": start, "damaged": wrong})


def _prompt_hash(partition: str, prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{partition}\0{prompt_id}".encode()).digest()[:4], "little")


def _map(path: Path, dtype: Any) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
