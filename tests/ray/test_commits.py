"""What a commit is of: whole units, however long their answers are."""

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.data import DataContext

from eagle3_ray.commits import read_units
from eagle3_ray.plan_units import UNIT_SCHEMA
from eagle3_ray.runs import RunDir

TURNS, LETTERS = 3, 4000


def _turns(units: pa.Table) -> pa.Table:
    ids = [unit for unit in units["unit"].to_pylist() for _ in range(TURNS)]
    return pa.table({"unit": ids, "answer": ["x" * LETTERS] * len(ids)})


@pytest.mark.usefixtures("cluster")
def test_no_block_ends_between_the_turns_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is committed with the first of its rows: turns in a later block would be lost to a kill between both."""
    run, folder = RunDir(tmp_path / "run"), tmp_path / "units"
    folder.mkdir()
    row = {"partition": "p", "sample_index": 0, "file": "f", "line": 1, "prompt_ids": [1], "turns": TURNS}
    units = pa.Table.from_pylist([{**row, "unit": i, "prompt_id": str(i)} for i in range(64)], schema=UNIT_SCHEMA)
    pq.write_table(units, folder / "000000.parquet", write_page_checksum=True)
    monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", 10 * LETTERS)
    made = read_units(run, str(folder), 1).map_batches(_turns, batch_size=None, batch_format="pyarrow").materialize()
    blocks = [ray.get(ref)["unit"].to_pylist() for ref in made.get_internal_block_refs()]
    assert sum(map(len, blocks)) == 64 * TURNS
    for number, block in enumerate(blocks):
        assert all(set(block).isdisjoint(other) for other in blocks[number + 1 :])


@pytest.mark.usefixtures("cluster")
def test_ray_would_cut_a_block_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows alone; which is why the test above means something."""
    monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", 10 * LETTERS)
    units = ray.data.from_arrow(pa.table({"unit": list(range(64))}))
    made = units.map_batches(_turns, batch_size=None, batch_format="pyarrow").materialize()
    blocks = [ray.get(ref)["unit"].to_pylist() for ref in made.get_internal_block_refs()]
    assert any(set(one) & set(other) for one, other in itertools.pairwise(blocks))
