"""A cache gives back the states that were put in, for the tokens that they belong to, or says what is broken."""

from pathlib import Path

import pytest
import torch

from eagle3_ray.states_cache import (
    DamagedShard,
    ShardWriter,
    StatesCache,
    about,
    bytes_per_token,
)

HIDDEN = 64
STORAGES = ("bf16", "fp8", "fp32")
ERROR = {"fp32": 0.0, "bf16": 2**-8, "fp8": 2**-4}
"""Largest error of a number: half a step of its mantissa (fp8 e4m3: 3 bits; bf16: 7 bits) relative to it."""


def write(path: Path, storage: str, lengths: dict[int, int]) -> dict[int, torch.Tensor]:
    torch.manual_seed(0)
    states = {row: torch.randn(tokens, 4 * HIDDEN) for row, tokens in lengths.items()}
    writer = ShardWriter(path, {"fingerprint": {"a": 1}})
    for row, values in states.items():
        writer.add(row, f"sha{row}", values, torch.arange(len(values)) - 1, storage)
    writer.commit()
    return states


@pytest.mark.parametrize("storage", STORAGES)
def test_states_come_back_as_exactly_as_the_storage_can_hold_them(tmp_path: Path, storage: str) -> None:
    states = write(tmp_path / "a.parquet", storage, {3: 2500, 1: 7})
    cache = StatesCache(tmp_path, HIDDEN, storage)
    assert cache.rows == [1, 3]
    for row, values in states.items():
        read, likeliest = cache.read(row, f"sha{row}")
        read = read.float()
        assert likeliest.tolist() == list(range(-1, len(values) - 1))
        largest = values.view(len(values), 4, HIDDEN).abs().amax(2, keepdim=True).expand(-1, -1, HIDDEN).flatten(1)
        assert read.shape == values.shape
        assert ((read - values).abs() <= ERROR[storage] * values.abs() + largest * 2**-17).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_shard_takes_the_bytes_that_the_planner_says(tmp_path: Path, storage: str) -> None:
    write(tmp_path / "a.parquet", storage, {0: 3000})
    size = (tmp_path / "a.parquet").stat().st_size
    assert size == pytest.approx(3000 * bytes_per_token(HIDDEN, storage), rel=0.03)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_flipped_bit_anywhere_is_found_and_other_sequences_still_read(tmp_path: Path, storage: str) -> None:
    path = tmp_path / "a.parquet"
    write(path, storage, {0: 300, 1: 300})
    whole = path.read_bytes()
    middle_of_first = whole[: len(whole) // 4]
    path.write_bytes(middle_of_first + bytes([whole[len(whole) // 4] ^ 1]) + whole[len(whole) // 4 + 1 :])
    cache = StatesCache(tmp_path, HIDDEN, storage)
    with pytest.raises(DamagedShard, match=r"a\.parquet"):
        cache.read(0, "sha0")
    assert cache.read(1, "sha1")[0].shape == (300, 4 * HIDDEN)


def test_a_torn_shard_is_found_by_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, "bf16", {0: 300})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedShard):
        about(path)


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "bf16", {0: 300})
    with pytest.raises(DamagedShard, match="other tokens"):
        StatesCache(tmp_path, HIDDEN, "bf16").read(0, "sha of a sequence that was generated again")


def test_a_shard_that_misnames_its_sequences_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, "bf16", {11: 30, 12: 30})
    whole = path.read_bytes()
    assert whole.count(b"[11, 12]") == 1
    for rows in (b"[11, 13]", b"[12, 11]", b"[11]    ", b"[11, 12}"):
        path.write_bytes(whole.replace(b"[11, 12]", rows))
        with pytest.raises(DamagedShard, match="not what was written"):
            StatesCache(tmp_path, HIDDEN, "bf16")


def test_columns_of_different_lengths_are_damage(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.parquet", {})
    writer.add(0, "sha0", torch.zeros(4, 4 * HIDDEN), torch.zeros(3).long(), "bf16")
    writer.commit()
    with pytest.raises(DamagedShard, match="columns of different lengths"):
        StatesCache(tmp_path, HIDDEN, "bf16").read(0, "sha0")
    with pytest.raises(DamagedShard, match="cannot reshape"):
        StatesCache(tmp_path, HIDDEN + 1, "bf16").read(0, "sha0")


def test_a_discarded_shard_leaves_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.parquet", {})
    writer.add(0, "sha", torch.zeros(4, 4 * HIDDEN), torch.zeros(4).long(), "bf16")
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_clean_shard_verifies(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "bf16", {0: 300})
