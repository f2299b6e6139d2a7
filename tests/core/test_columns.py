"""Columns that cross in one copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.columns import (
    columns_size,
    joined_columns,
    parted_columns,
    request_columns,
)
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch

INTS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(INTS, max_size=5), min_size=1, max_size=6))
def test_columns_come_back_and_begin_at_sixteen_bytes(columns: list[list[int]]) -> None:
    sizes = [len(one) for one in columns]
    joined = torch.from_numpy(joined_columns(columns))
    assert joined.dtype == torch.int64
    assert len(joined) == columns_size(sizes)
    parts = parted_columns(joined, sizes)
    assert [one.tolist() for one in parts] == columns
    assert not any(8 * one.storage_offset() % 16 for one in parts)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_columns_of_requests_name_the_place_of_each_new_token(
    requests: list[tuple[int, int, int]],
) -> None:
    rows, prefix_lens, extend_lens = [list(one) for one in zip(*requests, strict=True)] or [[]] * 3
    found = request_columns(rows, prefix_lens, extend_lens).send(torch.device("cpu"))
    places = [(row, prefix + j) for row, prefix, extend in requests for j in range(extend)]
    assert list(zip(found["rows_T"].tolist(), found["places_T"].tolist(), strict=True)) == places
    ends = [sum(extend_lens[:i]) for i in range(len(rows) + 1)]
    assert found["qo_indptr"].tolist() == ends
    assert found["seq_lens"].tolist() == [prefix + extend for _, prefix, extend in requests]
    given = {"req_pool_indices": rows, "prefix_lens": prefix_lens, "extend_lens": extend_lens}
    assert {name: found[name].tolist() for name in given} == given


def offsets(batch: Any) -> set[int]:
    """Offsets of whatever tensors it has, in bytes from 16."""
    tensors = [one for one in vars(batch).values() if isinstance(one, torch.Tensor)]
    assert len(tensors) > 3
    return {one.storage_offset() * one.element_size() % 16 for one in tensors}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_kernel_sees_how_many_requests_there_are(count: int) -> None:
    pool: Any = type("Table", (), {"req_to_token": torch.zeros(9, 64, dtype=torch.int32)})()
    none: Any = None
    lens = [3] * count
    batch = ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.arange(sum(lens)),
        req_pool_indices=list(range(1, count + 1)),
        prefix_lens=[2] * count,
        extend_lens=lens,
        logits_rows=[2],
        sampling=None,
    )
    cpu = torch.device("cpu")
    forward = ForwardBatch.init_new(batch, cpu, pool, none, none)
    assert offsets(forward) == {0}
    sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    params = [replace(sampled, frequency_penalty=0.1 * (i % 2)) for i in range(count)]
    reqs = [Req(str(i), [1, 2, 3], one, frozenset(), 7) for i, one in enumerate(params)]
    sampling = SamplingBatch.from_reqs(reqs, vocab_size=50, device=cpu)
    assert sampling.output_pos is not None
    assert sampling.random is not None
    found = sampling.output_pos, sampling.random.table.words
    assert not any(8 * one.storage_offset() % 16 for one in found)
