"""Groups of sequences for a forward pass, and how far two routes to a state are apart."""

import pytest
import torch

from eagle3_ray.target.protocol import in_groups, relative_error


@pytest.mark.parametrize(
    ("most", "groups"),
    [
        (5, [[3, 2], [5], [9], [1, 1, 1]]),
        (4, [[3], [2], [5], [9], [1, 1, 1]]),
        (0, [[3], [2], [5], [9], [1], [1], [1]]),
        (99, [[3, 2, 5, 9, 1, 1, 1]]),
    ],
)
def test_groups_keep_the_order_and_hold_no_more_than_is_allowed(most: int, groups: list[list[int]]) -> None:
    assert list(in_groups([3, 2, 5, 9, 1, 1, 1], lambda size: size, most)) == groups
    assert list(in_groups([], lambda size: size, most)) == []


def test_the_error_is_that_of_the_middle_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 1.0], [0.0, 0.0], [6.0, 8.0]])
    found = expected + torch.tensor([[0.0, 0.5], [0.0, 50.0], [0.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    assert relative_error(expected, found) == pytest.approx(0.1)  # of 0, 0, 0.1, 0.2 and 1
    assert relative_error(expected, expected) == 0.0
