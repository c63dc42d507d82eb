"""What a commit is of: whole units, however long their answers are."""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.data import DataContext

from eagle3_ray.generator import blocks_of
from eagle3_ray.records import BLOCK_SCHEMA

TURNS, TOKENS, UNITS = 3, 1000, 64
BLOCK_BYTES = 10 * 8 * TOKENS


def turns(units: pa.Table) -> list[list[dict[str, Any]]]:
    """Rows of long conversations, and of one that failed."""
    row = {"output_ids": [7] * TOKENS, "output_logprobs": [-0.5] * TOKENS}
    return [
        [{**row, "unit": unit, "turn": n} for n in range(TURNS if unit else 0)] for unit in units["unit"].to_pylist()
    ]


def whole(units: pa.Table) -> Iterator[pa.Table]:
    yield from blocks_of(turns(units), BLOCK_BYTES // 4)


def at_once(units: pa.Table) -> pa.Table:
    return pa.Table.from_pylist([row for unit in turns(units) for row in unit], schema=BLOCK_SCHEMA)


@pytest.mark.usefixtures("cluster")
def test_no_block_ends_between_the_turns_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is committed with the first of its rows: turns in a later block would be lost to a kill between both."""
    monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", BLOCK_BYTES)
    cut: dict[str, bool] = {}
    for made in (whole, at_once):
        units = ray.data.from_arrow(pa.table({"unit": list(range(UNITS))}))
        blocks = (
            units.map_batches(made, batch_size=None, batch_format="pyarrow").materialize().get_internal_block_refs()
        )
        rows = [ray.get(block).select(["unit", "turn"]).to_pylist() for block in blocks]
        assert len(rows) > 5
        assert list(itertools.chain(*rows)) == [{"unit": u, "turn": n} for u in range(1, UNITS) for n in range(TURNS)]
        cut[made.__name__] = any(one[-1]["unit"] == other[0]["unit"] for one, other in itertools.pairwise(rows))
    assert cut == {"whole": False, "at_once": True}  # the second is why this means something
