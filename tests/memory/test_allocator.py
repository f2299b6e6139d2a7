from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.errors import InvariantError
from specengine.memory.allocator import TokenToKVPoolAllocator


@given(st.integers(2, 40), st.sampled_from([1, 4, 16]), st.integers(0, 2**32))
def test_pages_are_handed_out_once(num_pages: int, page_size: int, seed: int) -> None:
    rnd = random.Random(seed)
    allocator = TokenToKVPoolAllocator(num_pages * page_size, page_size)
    assert allocator.capacity == (num_pages - 1) * page_size
    held: list[int] = []
    for _ in range(30):
        if rnd.random() < 0.5:
            count = rnd.randint(0, num_pages)
            pages = allocator.alloc_pages(count)
            assert (pages is None) == (count > num_pages - 1 - len(held))
            held += [] if pages is None else pages.tolist()
        elif held:
            rnd.shuffle(held)
            count = rnd.randint(1, len(held))
            allocator.free_pages(np.array(held[:count]))
            held = held[count:]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, num_pages))
        assert allocator.available == allocator.capacity - len(held) * page_size


def test_slots_of_a_page_are_contiguous() -> None:
    allocator = TokenToKVPoolAllocator(32, page_size=4)
    slots = allocator.slots_of(np.array([5, 1], dtype=np.int32))
    assert slots.tolist() == [20, 21, 22, 23, 4, 5, 6, 7]
    assert allocator.pages_of(slots[:6]).tolist() == [5, 1]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert TokenToKVPoolAllocator(32, page_size=4).pages_for(tokens) == pages


@pytest.mark.parametrize("page", [0, 2])
def test_freeing_what_nobody_owns_is_a_bug(page: int) -> None:
    allocator = TokenToKVPoolAllocator(4, page_size=1)
    allocator.alloc_pages(1)
    with pytest.raises(InvariantError, match="free already"):
        allocator.free_pages(np.array([page]))


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ValueError, match="less than two pages of 16"):
        TokenToKVPoolAllocator(31, page_size=16)
