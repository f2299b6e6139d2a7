from __future__ import annotations

import numpy as np
import pytest
import torch

from specengine.memory.req_to_token import ReqToTokenPool


def test_rows_are_handed_out_once_and_never_row_0() -> None:
    pool = ReqToTokenPool(3, 8, torch.device("cpu"))
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(row for row in rows if row is not None) == [1, 2, 3]
    assert pool.alloc() is None
    pool.free(2)
    assert (pool.num_free, pool.alloc()) == (1, 2)


def test_cpu_table_is_the_host_copy() -> None:
    pool = ReqToTokenPool(2, 4, torch.device("cpu"))
    pool.write(2, 1, np.array([7, 8], dtype=np.int32))
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 7, 8, 0]]
    assert pool.slots(2, 1, 4).tolist() == [7, 8, 0]


def test_a_flush_sends_what_was_written_and_nothing_else() -> None:
    """The device is played by another tensor."""
    pool = ReqToTokenPool(3, 6, torch.device("cpu"))
    pool._is_mirrored, pool.req_to_token = True, torch.full((4, 6), -1, dtype=torch.int32)
    pool.write(3, 4, np.array([9, 10], dtype=np.int32))
    pool.write(2, 0, np.array([], dtype=np.int32))
    pool.write(1, 0, np.array([1, 2, 3], dtype=np.int32))
    pool.write(1, 1, np.array([5, 6, 7], dtype=np.int32))
    assert pool.req_to_token.max() == -1
    pool.flush()
    expected = [[-1] * 6, [1, 5, 6, 7, -1, -1], [-1] * 6, [-1, -1, -1, -1, 9, 10]]
    assert pool.req_to_token.tolist() == expected
    pool.req_to_token.fill_(-1)
    pool.flush()
    assert pool.req_to_token.max() == -1, "sent twice"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_sees_writes_after_flush() -> None:
    pool = ReqToTokenPool(3, 6, torch.device("cuda"))
    pool.write(1, 0, np.array([1, 2, 3], dtype=np.int32))
    pool.write(3, 4, np.array([9, 10], dtype=np.int32))
    pool.write(1, 1, np.array([5, 6, 7], dtype=np.int32))
    assert pool.req_to_token.abs().sum().item() == 0
    pool.flush()
    assert pool.req_to_token[1].tolist() == [1, 5, 6, 7, 0, 0]
    assert pool.req_to_token[3].tolist() == [0, 0, 0, 0, 9, 10]
    pool.write(1, 0, np.array([4], dtype=np.int32))
    pool.flush()
    assert pool.req_to_token[1].tolist() == [4, 5, 6, 7, 0, 0]


def test_what_stands_behind_the_last_row_are_slots() -> None:
    """Which a token past the context's end looks for."""
    pool = ReqToTokenPool(2, 4, torch.device("cpu"))
    for row in (1, 2):
        pool.write(row, 0, np.full(4, 9, np.int32))
    table = pool.req_to_token
    assert table.shape == (3, 4)
    behind = torch.empty(0, dtype=torch.int32).set_(table.untyped_storage(), table.numel(), (4,))
    assert behind.tolist() == [0, 0, 0, 0]
