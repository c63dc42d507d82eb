"""Names and hashes of rows, held against numbers that were computed without the package."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys

import pyarrow as pa
import pytest

from eagle3_ray.records import SEQUENCE_SCHEMA, sequence_id, token_sha

DESIGN_COLUMNS = {
    *("sequence_id", "partition", "prompt_id", "turn", "sample_index", "prompt_ids", "output_ids", "output_logprobs"),
    *("finish_reason", "matched_stop", "weight_version", "endpoint", "latency_s", "attempts", "token_sha"),
}


def test_the_schema_has_every_column_of_the_design_and_ids_are_int32() -> None:
    assert DESIGN_COLUMNS - set(SEQUENCE_SCHEMA.names) == set()
    assert "reason" in SEQUENCE_SCHEMA.names
    for name in ("prompt_ids", "output_ids"):
        assert SEQUENCE_SCHEMA.field(name).type == pa.list_(pa.int32())
    assert SEQUENCE_SCHEMA.field("output_logprobs").type == pa.list_(pa.float32())


def test_a_sequence_id_is_the_head_of_a_sha256_over_its_parts() -> None:
    # printf 'B1\0q-7\0001\0002' | sha256sum
    assert sequence_id("B1", "q-7", 1, 2) == "655a7c9beb9af13527a83c3e6aefcede"


def test_a_sequence_id_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from eagle3_ray.records import sequence_id; print(sequence_id('päd', 'ü😀', 3, 4))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert out.stdout.strip() == sequence_id("päd", "ü😀", 3, 4)


def test_sequence_ids_of_different_answers_differ() -> None:
    partitions, prompts = ["a", "a1", "b"], ["", "0", "1", "1\x000", "a", "a1", "ä"]
    names = {sequence_id(*parts) for parts in itertools.product(partitions, prompts, range(3), range(12))}
    assert len(names) == 3 * 7 * 3 * 12
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)


@pytest.mark.parametrize("seed", range(5))
def test_a_token_sha_is_the_sha256_of_length_and_ids_as_little_endian_int32(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(200_000) for _ in range(rng.randrange(1, 50))]
    output = [rng.randrange(200_000) for _ in range(rng.randrange(0, 50))]
    packed = struct.pack(f"<{1 + len(prompt) + len(output)}i", len(prompt), *prompt, *output)
    assert token_sha(prompt, output) == hashlib.sha256(packed).hexdigest()


def test_a_token_sha_of_nothing_is_that_of_four_zero_bytes() -> None:
    # head -c4 /dev/zero | sha256sum
    assert token_sha([], []) == "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"


def test_a_token_sha_changes_with_any_id_any_order_and_the_boundary() -> None:
    shas = {
        token_sha([1, 2], [3, 4]),
        token_sha([1, 2, 3], [4]),
        token_sha([1], [2, 3, 4]),
        token_sha([2, 1], [3, 4]),
        token_sha([1, 2], [4, 3]),
        token_sha([1, 2], [3]),
        token_sha([1, 2], [3, 4, 4]),
        token_sha([1, 2], [3, 5]),
    }
    assert len(shas) == 8


def test_an_id_that_is_no_int32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        token_sha([2**31], [])
