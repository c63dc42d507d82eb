"""The draft vocabulary from counts, and the maps of checkpoints."""

import time

import pytest
import torch

from eagle3_ray.drafter.vocabulary import DraftVocabulary


def test_the_most_frequent_tokens_are_drafted_and_ties_go_to_the_lower_id() -> None:
    vocabulary = DraftVocabulary.from_counts(torch.tensor([5, 0, 7, 5, 5, 1]), 3)
    assert vocabulary.target_ids().tolist() == [0, 2, 3]
    assert vocabulary.d2t.tolist() == [0, 1, 1]  # offsets
    assert vocabulary.t2d.tolist() == [True, False, True, True, False, False]
    assert vocabulary.coverage == pytest.approx(17 / 23)


def test_special_tokens_are_drafted_however_rare() -> None:
    vocabulary = DraftVocabulary.from_counts(torch.tensor([5, 0, 7, 5, 5, 1]), 3, always=[5, 1])
    assert vocabulary.target_ids().tolist() == [1, 2, 5]


def test_a_vocabulary_of_163840_tokens_takes_less_than_a_second() -> None:
    counts = torch.randint(0, 1000, (163840,), generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    vocabulary = DraftVocabulary.from_counts(counts, 32000, always=range(163584, 163840))
    assert time.process_time() - started < 1
    assert int(vocabulary.t2d.sum()) == 32000


def test_a_warm_start_inherits_the_map() -> None:
    first = DraftVocabulary.from_counts(torch.tensor([5, 0, 7, 5, 5, 1]), 3)
    later = DraftVocabulary.inherited(first.d2t, 6)
    assert torch.equal(later.d2t, first.d2t)
    assert torch.equal(later.t2d, first.t2d)
    assert later.coverage is None


def test_target_ids_in_place_of_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match="must rise within the target's vocabulary of 6"):
        DraftVocabulary.inherited(torch.tensor([0, 2, 5]), 6)


def test_maps_of_two_checkpoints_do_not_mix() -> None:
    first = DraftVocabulary.from_counts(torch.tensor([5, 0, 7, 5, 5, 1]), 3)
    other = DraftVocabulary.from_counts(torch.tensor([1, 9, 9, 9, 5, 1]), 3)
    with pytest.raises(ValueError, match="not the same ones"):
        DraftVocabulary(first.d2t, other.t2d, None)


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (7, [], "draft_vocab_size 7 must be from 1 to the target's vocab_size 6"),
        (2, [1, 2, 3], "3 always-drafted ids do not fit draft_vocab_size 2"),
        (2, [6], "must lie in the target's vocabulary of 6"),
    ],
)
def test_an_impossible_vocabulary_is_refused_by_name(size: int, always: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVocabulary.from_counts(torch.arange(6), size, always)
