"""Captured states on disk: one Parquet file a shard, one row group a sequence, a checksum on every page.

States are one tensor [T, 4H]: the three auxiliary states and the last one side by side. Beside them stands the target's
likeliest next token after each token, which training would otherwise look for in all of the vocabulary. A row holds
up to 1,024 tokens of a sequence, so no value nears Parquet's 2 GB. A shard gets its name when it is whole; reading
a sequence reads its row group.

    bf16   2 bytes a number, 8H bytes a token: what a bf16 target computes
    fp8    e4m3 with a float32 scale for each token and each of the four states: 4H + 16 bytes a token
    fp32   4 bytes a number, 16H bytes a token: for exact comparisons on a CPU
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from eagle3_ray.whole_files import temporary

STATES = 4
"""Hidden states that are kept of each token: three auxiliary ones and the last."""

_CHUNK_TOKENS = 1024
_FP8_MAX = 448.0
_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("token_sha", pa.string()),
        ("states", pa.binary()),
        ("scales", pa.binary()),
        ("likeliest", pa.binary()),
    ]
)
SCORES_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("sequence_id", pa.string()),
        ("tokens", pa.int32()),
        ("mean_difference", pa.float32()),
        ("worst_window", pa.float32()),
        ("relative_difference", pa.float32()),
        ("argmax_agreement", pa.float32()),
        ("mean_logprob", pa.float32()),
        ("reason", pa.string()),  # null unless the sequence is set aside
    ]
)
"""What the on-policy check found, a row per sequence."""
_ABOUT = b"eagle3_ray.shard"
_SEAL = b"eagle3_ray.shard_sha256"
_UNREADABLE = (OSError, pa.ArrowException, LookupError, MemoryError, TypeError, ValueError)
"""What reading a Parquet file raises whose bytes are not those that were written."""


class DamagedShard(RuntimeError):
    """A shard is not what was written; `path` is the file."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} is damaged ({what}). Remove it and run jobs/capture.py again: only its sequences are captured."
        )
        self.path = path


def bytes_per_token(hidden: int, storage: str) -> int:
    """Bytes that a token's four states take, and its likeliest successor."""
    return 4 + {"bf16": 8 * hidden, "fp8": 4 * hidden + 4 * STATES, "fp32": 16 * hidden}[storage]


def encode(states: torch.Tensor, storage: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
    """States [T, 4H] as stored numbers [T, 4H] (uint16, uint8 or float32) and, for fp8, their scales [T, 4]."""
    if storage == "bf16":
        return states.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16), None
    if storage == "fp32":
        return states.float().contiguous().numpy(), None
    parts = states.float().view(len(states), STATES, -1)
    scales = parts.abs().amax(dim=2).clamp_min(1e-30) / _FP8_MAX
    small = (parts / scales[:, :, None]).to(torch.float8_e4m3fn)
    return small.view(torch.uint8).flatten(1).numpy(), scales.numpy()


def decode(stored: npt.NDArray[Any], scales: npt.NDArray[np.float32] | None, storage: str) -> torch.Tensor:
    """The inverse of `encode`: states [T, 4H], bfloat16 from bf16 and fp8, float32 from fp32."""
    if storage == "bf16":
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    if storage == "fp32":
        return torch.from_numpy(stored)
    assert scales is not None
    parts = torch.from_numpy(stored).view(torch.float8_e4m3fn).float().view(len(stored), STATES, -1)
    return (parts * torch.from_numpy(scales)[:, :, None]).flatten(1).to(torch.bfloat16)


class ShardWriter:
    """Writes one shard under a temporary name; `commit` gives it its own."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = dict(about)
        self._rows: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary(path)
        self._writer = pq.ParquetWriter(
            self._temporary, _SCHEMA, compression="none", use_dictionary=False, write_page_checksum=True
        )

    def add(self, row: int, token_sha: str, states: torch.Tensor, likeliest: torch.Tensor, storage: str) -> None:
        """Adds a sequence as one row group: states [T, 4H], and the target's likeliest token after each token [T]."""
        stored, scales = encode(states, storage)
        tokens = likeliest.numpy().astype("<i4")
        chunks = [
            {
                "row": row,
                "token_sha": token_sha,
                "states": stored[first : first + _CHUNK_TOKENS].tobytes(),
                "scales": None if scales is None else scales[first : first + _CHUNK_TOKENS].tobytes(),
                "likeliest": tokens[first : first + _CHUNK_TOKENS].tobytes(),
            }
            for first in range(0, len(stored), _CHUNK_TOKENS)
        ]
        self._writer.write_table(pa.Table.from_pylist(chunks, schema=_SCHEMA))
        self._rows.append(row)

    def commit(self) -> int:
        """Makes the shard visible and returns its bytes."""
        about = json.dumps(self._about | {"rows": self._rows}).encode()
        self._writer.add_key_value_metadata({_ABOUT: about, _SEAL: hashlib.sha256(about).hexdigest()})
        self._writer.close()
        size = self._temporary.stat().st_size
        os.replace(self._temporary, self._path)
        return size

    def discard(self) -> None:
        """Leaves nothing behind of a shard that will not be whole."""
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


def about(path: Path) -> dict[str, Any]:
    """What the shard says of itself: what it was written with, and `rows`, the sequences that it holds, in order.

    Raises:
        DamagedShard: its end, where Parquet keeps this, cannot be read.
    """
    try:
        metadata = pq.read_metadata(path).metadata or {}
        about, seal = metadata[_ABOUT], metadata[_SEAL]
    except _UNREADABLE as error:
        raise DamagedShard(path, _first_line(error)) from None
    if hashlib.sha256(about).hexdigest().encode() != seal:
        raise DamagedShard(path, "what it says of itself is not what was written")
    said: dict[str, Any] = json.loads(about)
    return said


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True)
class _Place:
    path: Path
    group: int


class StatesCache:
    """All shards of a folder, by sequence."""

    def __init__(self, folder: Path, hidden: int, storage: str) -> None:
        self._width = STATES * hidden
        self._storage = storage
        self._places: dict[int, _Place] = {}
        for path in sorted(folder.glob("*.parquet")):
            for group, row in enumerate(about(path)["rows"]):
                self._places[row] = _Place(path, group)

    @property
    def rows(self) -> list[int]:
        """The sequences that the cache holds."""
        return sorted(self._places)

    def read(self, row: int, token_sha: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The states [T, 4H] of a sequence, and the target's likeliest token after each token, int64 [T].

        Raises:
            DamagedShard: a page's checksum does not match, or these are the states of other tokens.
        """
        place = self._places[row]
        try:
            with pq.ParquetFile(place.path, page_checksum_verification=True, memory_map=True) as file:
                chunks = file.read_row_group(place.group).to_pydict()
            owner = set(chunks["row"]), set(chunks["token_sha"])
            stored, scales, likeliest = self._numbers(chunks)
        except _UNREADABLE as error:
            raise DamagedShard(place.path, _first_line(error)) from None
        if owner != ({row}, {token_sha}):
            raise DamagedShard(place.path, f"row group {place.group} holds the states of other tokens")
        if len(likeliest) != len(stored) or (scales is not None and len(scales) != len(stored)):
            raise DamagedShard(place.path, f"row group {place.group} holds columns of different lengths")
        return decode(stored, scales, self._storage), torch.from_numpy(likeliest)

    def _numbers(
        self, chunks: Mapping[str, Sequence[bytes]]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None, npt.NDArray[np.int64]]:
        """Stored states [T, 4H], their scales [T, 4] (fp8), and the likeliest tokens [T] of a row group's columns."""
        dtype = {"bf16": "<u2", "fp8": "u1", "fp32": "<f4"}[self._storage]
        stored = np.frombuffer(bytearray(b"".join(chunks["states"])), dtype).reshape(-1, self._width)
        likeliest = np.frombuffer(b"".join(chunks["likeliest"]), "<i4").astype(np.int64)
        if self._storage != "fp8":
            return stored, None, likeliest
        scales = np.frombuffer(bytearray(b"".join(chunks["scales"])), "<f4").reshape(-1, STATES)
        return stored, scales, likeliest


def write_scores(path: Path, scores: list[dict[str, Any]]) -> None:
    """Writes a shard's scores, a row a sequence: SCORES_SCHEMA."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary(path)  # a report may read them at any moment
    pq.write_table(pa.Table.from_pylist(scores, schema=SCORES_SCHEMA), fresh, write_page_checksum=True)
    os.replace(fresh, path)


def read_scores(path: Path) -> pa.Table:
    """A shard's scores, a row a sequence: SCORES_SCHEMA.

    Raises:
        DamagedShard: they are missing or not what was written.
    """
    try:
        return pq.read_table(path, schema=SCORES_SCHEMA, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise DamagedShard(path, str(error).splitlines()[0]) from None
