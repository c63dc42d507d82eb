"""The batch plan is a function of lengths, sizes and seed, loses nothing and fills its batches."""

import numpy as np
import pytest

from eagle3_ray.batches import Batch, pack, steps


def lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5.3, 0.6, count).astype(np.int64).clip(8, 2000)


@pytest.mark.parametrize("count", [1, 7, 300, 5000])
def test_every_sequence_is_in_exactly_one_batch_of_an_epoch(count: int) -> None:
    tokens = lengths(count)
    batches = pack(tokens, range(count), 2048, (0, 0))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(count))
    assert all(sum(int(tokens[row]) for row in batch.rows) <= 2048 for batch in batches)


def test_batches_are_at_least_95_percent_full() -> None:
    tokens = lengths(5000)
    batches = pack(tokens, range(5000), 4096, (0, 0))
    assert tokens.sum() / (4096 * len(batches)) > 0.95  # no sequence is longer than a batch


def test_a_sequence_longer_than_a_batch_is_kept_whole_in_a_batch_of_its_own() -> None:
    tokens = np.array([100, 5000, 100])
    assert Batch((1,)) in pack(tokens, range(3), 1024, (0, 0))


def test_the_plan_is_the_same_each_time_and_another_one_in_each_epoch_and_for_each_seed() -> None:
    tokens = lengths(300)
    plan = {"batch_tokens": 2048, "step_tokens": 8192, "epochs": 2}
    first, again, other = (list(steps(tokens, range(300), seed=seed, **plan)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    epochs = [[step.batches for step in first if step.epoch == epoch] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]


def test_steps_are_numbered_through_all_epochs_and_each_epoch_holds_every_sequence_once() -> None:
    tokens = lengths(300)
    plan = list(steps(tokens, range(300), batch_tokens=2048, step_tokens=8192, epochs=3, seed=0))
    assert [step.number for step in plan] == list(range(len(plan)))
    for epoch in range(3):
        rows = [row for step in plan if step.epoch == epoch for batch in step.batches for row in batch.rows]
        assert sorted(rows) == list(range(300))


def test_a_step_of_a_batch_s_size_is_one_batch() -> None:
    tokens = lengths(1000)
    plan = steps(tokens, range(1000), batch_tokens=2048, step_tokens=2048, epochs=1, seed=0)
    assert max(len(step.batches) for step in plan) <= 2  # the last one may take in a small rest


def test_a_step_takes_batches_until_it_has_its_tokens_and_no_step_is_less_than_half_of_that() -> None:
    tokens = lengths(1000)
    for step in steps(tokens, range(1000), batch_tokens=2048, step_tokens=8192, epochs=2, seed=0):
        sizes = [sum(int(tokens[row]) for row in batch.rows) for batch in step.batches]
        assert sum(sizes) >= 4096
        assert sum(sizes[:-1]) < 8192 + 4096


def test_batches_hold_long_and_short_sequences_from_all_over_the_data() -> None:
    tokens = lengths(3000)
    first = [row for batch in pack(tokens, range(3000), 4096, (0, 0))[:30] for row in batch.rows]
    assert np.std(first) > 600  # 866 where all rows are equally likely
