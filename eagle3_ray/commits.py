"""How a Ray Data job reads the units that are left and commits the rows that are done.

The commit is Ray Data's own row checkpoint: a pending checkpoint file, the data files, then a rename. Reading what is
left is ours. Ray 2.60 filters committed rows in a pool of actors with a CPU each, which grows until nothing is left for
the actors that generate: a resumed job on a cluster of two CPUs never went on (tests/ray/test_small_cluster.py).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import Dataset, Datasource
from ray.data._internal.datasource.parquet_datasink import ParquetDatasink
from ray.data.block import BlockMetadata
from ray.data.checkpoint import CheckpointConfig, CheckpointManager
from ray.data.datasource import ReadTask

from eagle3_ray.ledger import Ledger
from eagle3_ray.plan import damaged_units, reading_units
from eagle3_ray.plan_units import UNIT_SCHEMA
from eagle3_ray.records import BLOCK_SCHEMA, FOLDER
from eagle3_ray.runs import GENERATE, RunDir, RunError, WriterLock

_ROWS_PER_FILE = 1024
LIGHT = 0.25
"""CPUs of tasks that mostly wait for a disk."""


def read_units(run_dir: RunDir, folder: str, groups_per_block: int) -> Dataset:
    """The units in `folder` that are not committed yet, in blocks of that many row groups of the plan."""
    ledger = Ledger(run_dir)
    committed = ray.put(committed_units(ledger))  # 8 bytes a unit
    units = ray.data.read_datasource(UnitsSource(folder, groups_per_block, committed), num_cpus=LIGHT)
    units.context.checkpoint_config = CheckpointConfig(
        id_column="unit",
        checkpoint_path=str(ledger.checkpoint),
        delete_checkpoint_on_success=False,  # a second run is a no-op
        checkpoint_manager_cls=PendingCleaner,
    )
    return units


def committed_units(ledger: Ledger) -> npt.NDArray[np.int64]:
    """The units whose rows are committed, sorted. Raises RunError: a file of them is damaged."""
    units = [np.array([], np.int64)]
    for file in sorted(ledger.checkpoint.glob("*.parquet")):
        if not file.name.endswith(".pending.parquet"):
            with ledger.reading(file):
                units.append(pq.read_table(file, columns=["unit"])["unit"].to_numpy())
    return np.unique(np.concatenate(units))


@dataclass(frozen=True)
class _ReadGroups:
    """Reads some row groups of one file of the plan, without the units that are committed."""

    file: str
    groups: list[int]
    committed: Any

    def __call__(self) -> Iterator[pa.Table]:
        units = read_groups(self.file, self.groups)
        done = np.isin(units["unit"].to_numpy(), ray.get(self.committed))
        if not done.all():
            yield units.filter(pa.array(~done))


def read_groups(file: str, groups: list[int]) -> pa.Table:
    """Row groups of a file of the plan. Raises RunError: it is not as it was written."""
    with reading_units(file), pq.ParquetFile(file, page_checksum_verification=True) as opened:
        units = opened.read_row_groups(groups)
    if not units.schema.equals(UNIT_SCHEMA):
        raise damaged_units(file, f"its columns are {', '.join(units.schema.names)}")
    return units


class UnitsSource(Datasource):  # type: ignore[misc]
    """The units of a plan: a read task for every `groups_per_block` row groups."""

    def __init__(self, folder: str, groups_per_block: int, committed: Any) -> None:
        super().__init__()
        self._files = sorted(Path(folder).glob("*.parquet"))
        self._groups_per_block = groups_per_block
        self._committed = committed

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self._files)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One task for each block, whatever parallelism Ray would choose."""
        tasks = []
        for file in self._files:
            with reading_units(file):
                about = pq.read_metadata(file)
            for first in range(0, about.num_row_groups, self._groups_per_block):
                groups = list(range(first, min(first + self._groups_per_block, about.num_row_groups)))
                rows = sum(about.row_group(group).num_rows for group in groups)
                size = sum(about.row_group(group).total_byte_size for group in groups)
                metadata = BlockMetadata(num_rows=rows, size_bytes=size, exec_stats=None, input_files=None)
                tasks.append(ReadTask(_ReadGroups(str(file), groups, self._committed), metadata))
        return tasks


class PendingCleaner(CheckpointManager):  # type: ignore[misc]
    """Removes what a killed job was writing, as Ray's own manager does, and leaves the filtering to UnitsSource."""

    def load_checkpoint(self, data_file_dir: str | None = None, data_file_filesystem: Any = None) -> tuple[None, int]:
        """Nothing to filter by."""
        self._clean_pending_checkpoints(data_file_dir, data_file_filesystem)
        return None, 0


class SequenceSink(ParquetDatasink):  # type: ignore[misc]
    """Writes rows to sequences/ and rejected/, by the column `folder`, as one commit of Ray's checkpoint.

    Every file carries the fingerprint. A task that a killed job left behind finds that the run has another owner.
    """

    def __init__(self, run_dir: RunDir, token: str) -> None:
        fingerprint = json.dumps(run_dir.manifest()[GENERATE]["fingerprint"])
        super().__init__(
            str(Ledger(run_dir).rows),
            partition_cols=[FOLDER],
            arrow_parquet_args={
                "schema": BLOCK_SCHEMA.with_metadata({"eagle3_ray.fingerprint": fingerprint}),
                "compression": "zstd",
                "partitioning_flavor": None,  # plain folder names
            },
        )
        self._run_path = str(run_dir.path)
        self._token = token

    @property
    def min_rows_per_write(self) -> int:
        """Rows that Ray gathers before it writes a file."""
        return _ROWS_PER_FILE

    def write(self, blocks: Any, ctx: Any) -> None:
        """Writes one task's files. Raises RunError where another job has taken over the run."""
        if not WriterLock.is_current(self._run_path, self._token):
            raise RunError(f"another job has taken over {self._run_path}; this one writes nothing more")
        super().write(blocks, ctx)
