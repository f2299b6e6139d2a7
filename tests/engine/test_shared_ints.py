"""Lists of ints from tensors, whose ints are shared objects."""

from __future__ import annotations

import pytest
import torch

from specengine.engine.round.shared_ints import SharedInts


@pytest.mark.parametrize("values", [[[0, 999], [998, 5]], [[0, -1]], [[1000, 7]], [[], []]])
def test_lists_are_those_that_a_tensor_gives(values: list[list[int]]) -> None:
    """Ids that there is no shared int for, too: below 0 they are not counted from the end."""
    tensor = torch.tensor(values, dtype=torch.int64)
    assert SharedInts(1000).lists_of(tensor) == values


def test_columns_of_a_wider_tensor_are_read() -> None:
    tensor = torch.arange(12).view(2, 6)[:, 1:3]
    assert SharedInts(1000).lists_of(tensor) == [[1, 2], [7, 8]]


def test_ints_are_shared() -> None:
    ints = SharedInts(1000)
    first, second = (ints.lists_of(torch.tensor([[900, 901]]))[0] for _ in range(2))
    assert type(first[0]) is int
    assert all(one is other for one, other in zip(first, second, strict=True))
