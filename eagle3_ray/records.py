"""The data contracts between stages: what a generated sequence is, and how it is identified.

A stage hands on token ids, never text. `sequence_id` says which answer a row is, `token_sha` which tokens it holds;
every later stage carries both and refuses a row where they disagree.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SEQUENCES = "sequences"
REJECTED = "rejected"

SEQUENCE_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        (
            "unit",
            pa.int64(),
        ),  # the planned piece of work that the row belongs to: one prompt, one sample, all its turns
        ("partition", pa.string()),
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("sample_index", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("output_logprobs", pa.list_(pa.float32())),  # null unless generate.record_logprobs
        ("finish_reason", pa.string()),  # "stop" or "length"
        ("matched_stop", pa.int32()),  # the stop token, null where finish_reason is "length"
        ("weight_version", pa.string()),
        ("endpoint", pa.string()),
        ("latency_s", pa.float32()),
        ("attempts", pa.int32()),
        ("token_sha", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("reason", pa.string()),  # null in sequences/, why the row is not fit in rejected/
    ]
)
"""A row of `sequences/*.parquet` and of `rejected/*.parquet`."""

FOLDER = "folder"
BLOCK_SCHEMA = SEQUENCE_SCHEMA.append(pa.field(FOLDER, pa.string()))
"""A row on its way to disk; `folder` says whether it goes to sequences/ or to rejected/."""

Row = dict[str, Any]
"""One row of SEQUENCE_SCHEMA; absent keys are null."""


def sequence_id(partition: str, prompt_id: str, turn: int, sample_index: int) -> str:
    """The stable name of one answer: 32 hexadecimal digits, equal on every machine and in every run."""
    name = "\0".join((partition, prompt_id, str(turn), str(sample_index)))
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def token_sha(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """SHA-256 of the prompt's length and all ids as little-endian int32, so that the answer's boundary counts too."""
    return token_sha_of(np.asarray([*prompt_ids, *output_ids], dtype="<i4"), len(prompt_ids))


def token_sha_of(ids: npt.NDArray[np.int32], prompt_tokens: int) -> str:
    """`token_sha` of prompt and answer in one int32 array, of which the first `prompt_tokens` are the prompt."""
    digest = hashlib.sha256(np.asarray([prompt_tokens], dtype="<i4").tobytes())
    digest.update(ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()
