"""The generated sequences as one flat file of ids, so that any of them is read by its place.

Made once from the rows of a complete generate stage, in the order of `sequence_id`:

    RUN/corpus/ids.bin         int32, little-endian: prompt and answer of every sequence, one behind the other
    RUN/corpus/logprobs.bin    float32: log-probabilities of the answer tokens (NaN for prompts and where not recorded)
    RUN/corpus/index.parquet   a row per sequence: identity, where it begins, how long its prompt and all of it is
    RUN/corpus/corpus.json     the key of what it was made from, its counts, and the hash of the index

A row whose ids do not hash to its `token_sha`, or whose name is not its `sequence_id`, is damaged: it is left out and
named. What is read from the files is held against the hashes in the index.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_ray.ledger import Ledger
from eagle3_ray.records import SEQUENCES, Row, sequence_id, token_sha, token_sha_of
from eagle3_ray.runs import GENERATE, RunDir, RunError, read_json, write_json

_FOLDER = "corpus"
_INDEX_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("token_sha", pa.string()),
        ("partition", pa.string()),
        ("prompt_hash", pa.uint32()),  # equal for all turns and samples of a prompt, and where the first turn is equal
        ("start", pa.int64()),  # of the sequence in ids.bin and logprobs.bin, in tokens
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("logprobs_crc", pa.uint32()),  # CRC-32 of the sequence in logprobs.bin
    ]
)
_ROWS_AT_ONCE = 512
_READ = """
SELECT sequence_id, token_sha, partition, prompt_id, turn, sample_index, prompt_ids, output_ids, output_logprobs,
       first_prompt
FROM read_parquet($files) LEFT JOIN (
    SELECT partition, prompt_id, arg_min(sha256(prompt_ids::VARCHAR), (turn, sample_index)) AS first_prompt
    FROM read_parquet($files) GROUP BY ALL
) USING (partition, prompt_id)
ORDER BY sequence_id
"""


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk. Small enough to travel to actors, which map its files into memory on first use."""

    folder: Path
    key: str

    @cached_property
    def _index(self) -> pa.Table:
        try:
            content = (self.folder / "index.parquet").read_bytes()
        except OSError:
            content = b""
        about = read_json(self.folder / "corpus.json", _remedy(self.folder))
        if hashlib.sha256(content).hexdigest() != about.get("index_sha256"):
            raise self._damage("index.parquet", "its hash is not the one in corpus.json")
        return pq.read_table(pa.BufferReader(content))

    @cached_property
    def _ids(self) -> npt.NDArray[np.int32]:
        return self._map("ids.bin", np.dtype("<i4"))

    @cached_property
    def _logprobs(self) -> npt.NDArray[np.float32]:
        return self._map("logprobs.bin", np.dtype("<f4"))

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

    @cached_property
    def _logprobs_crc(self) -> npt.NDArray[np.uint32]:
        return self.column("logprobs_crc")

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
        if token_sha_of(ids, int(self.prompt_tokens[row])) != self.token_sha(row):
            raise self._damage("ids.bin", f"sequence {self.sequence_id(row)} is not what was generated")
        return ids

    def logprobs(self, row: int) -> npt.NDArray[np.float32] | None:
        """The recorded log-probabilities of the answer tokens [T - prompt_tokens], None where none were recorded.

        Raises:
            RunError: they are not those that were recorded.
        """
        logprobs = self._slice(self._logprobs, row)
        if zlib.crc32(logprobs.tobytes()) != self._logprobs_crc[row]:
            raise self._damage("logprobs.bin", f"sequence {self.sequence_id(row)} has other values than were recorded")
        logprobs = logprobs[self.prompt_tokens[row] :]
        return None if np.isnan(logprobs).any() else logprobs

    def heldout(self, share: float) -> npt.NDArray[np.bool_]:
        """Which sequences are kept for validation: by the hash of their first turn, so none is on both sides."""
        return self.column("prompt_hash") < share * 2**32

    def answer_counts(self, rows: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each token id [vocab_size] is an answer token of these sequences. Raises RunError: see `ids`."""
        counts = np.zeros(vocab_size, np.int64)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            answers = [self.ids(row)[self.prompt_tokens[row] :] for row in some]
            counts += np.bincount(np.concatenate(answers), minlength=vocab_size)
        return counts

    def _slice(self, array: npt.NDArray[Any], row: int) -> npt.NDArray[Any]:
        start = self._starts[row]
        return array[start : start + self.tokens[row]]

    def _map(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        path = self.folder / name
        try:
            return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        except (OSError, ValueError) as error:
            raise self._damage(name, str(error)) from None

    def _damage(self, name: str, what: str) -> RunError:
        return RunError(f"{self.folder / name} is damaged: {what}. {_remedy(self.folder)}")


def make(run_dir: RunDir) -> Corpus:
    """The corpus of a run, made where there is none for the rows that the run holds now.

    Raises:
        RunError: the generate stage is not complete or damaged, or holds no sequence that can be used.
    """
    if not run_dir.succeeded(GENERATE):
        raise RunError(f"{run_dir.path} has no complete generate stage; run jobs/generate.py with this run.dir first.")
    ledger, folder = Ledger(run_dir), run_dir.stage(_FOLDER)
    key = _key(run_dir, ledger)
    if _key_of(folder) != key:
        ledger.check()
        new = folder.with_name(f".{_FOLDER}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        _write(new, ledger, key)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
    corpus = Corpus(folder, key)
    if len(corpus) == 0:
        raise RunError(f"{run_dir.path} holds no sequence that can be used; see python jobs/doctor.py {run_dir.path}.")
    return corpus


def damaged(corpus: Corpus) -> list[str]:
    """Ids of the sequences that were left out, because their tokens are not those that were generated."""
    return list(read_json(corpus.folder / "corpus.json", _remedy(corpus.folder))["damaged"])


def _remedy(folder: Path) -> str:
    return f"Delete the folder {folder}; the next job makes it again from the generated rows."


def _key_of(folder: Path) -> str | None:
    """The key of the corpus that is there; None where there is none, or a damaged one, which is made again."""
    try:
        key: str | None = read_json(folder / "corpus.json", _remedy(folder)).get("key")
    except RunError:
        return None
    return key


def _key(run_dir: RunDir, ledger: Ledger) -> str:
    """Names what the corpus is made of: files are written once, so their names and sizes stand for their content."""
    digest = hashlib.sha256(json.dumps(run_dir.manifest()[GENERATE]["fingerprint"]).encode())
    for file in ledger.files(SEQUENCES):
        digest.update(f"{Path(file).name} {os.path.getsize(file)}\n".encode())
    return digest.hexdigest()[:16]


def _write(folder: Path, ledger: Ledger, key: str) -> None:
    what = f"A file in {ledger.rows / SEQUENCES}"
    try:
        with ledger.asked(what):
            tokens, wrong = _write_sequences(folder, ledger.files(SEQUENCES))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ledger.damage(what, error) from None
    index_sha = hashlib.sha256((folder / "index.parquet").read_bytes()).hexdigest()
    about = {"key": key, "tokens": tokens, "damaged": wrong, "index_sha256": index_sha}
    write_json(folder / "corpus.json", about)


def _write_sequences(folder: Path, files: list[str]) -> tuple[int, list[str]]:
    """Writes the files of the corpus; returns its tokens, and the ids of the sequences that were left out."""
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
                if not _is_whole(row):
                    wrong.append(str(row["sequence_id"]))
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
                        "prompt_hash": int(row["first_prompt"][:8], 16),
                        "start": start,
                        "prompt_tokens": len(prompt),
                        "tokens": len(logprobs),
                        "logprobs_crc": zlib.crc32(logprobs.tobytes()),
                    }
                )
                start += len(logprobs)
            index.write_table(pa.Table.from_pylist(rows, schema=_INDEX_SCHEMA))
    shutil.rmtree(folder / "spill", ignore_errors=True)
    return start, wrong


def _is_whole(row: Row) -> bool:
    """Whether a row is what its own hashes say: its tokens, its name, and a log-probability for each answer token."""
    name = [row[part] for part in ("partition", "prompt_id", "turn", "sample_index")]
    ids, logprobs = (row["prompt_ids"], row["output_ids"]), row["output_logprobs"]
    if None in name or None in ids or any(token is None for part in ids for token in part):
        return False
    if logprobs is not None and (len(logprobs) != len(ids[1]) or None in logprobs):
        return False
    return (token_sha(*ids), sequence_id(*name)) == (row["token_sha"], row["sequence_id"])
