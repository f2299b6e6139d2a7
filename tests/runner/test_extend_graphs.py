"""Which captured prefill serves a batch, and what it takes from the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.runner.extend_graphs import FEW, MANY, SHAPES, ExtendGraphRunner, Inputs, Shape
from specengine.runner.graph_counters import GraphStats


def prefill(extend_lens: list[int]) -> ModelWorkerBatch:
    ends = torch.tensor(extend_lens).cumsum(0)
    return ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.arange(sum(extend_lens)) + 5,
        req_pool_indices=list(range(len(extend_lens), 0, -1)),
        prefix_lens=[10, *[0] * (len(extend_lens) - 1)],
        extend_lens=extend_lens,
        logits_rows=(ends - 1).tolist(),
        sampling=None,
    )


def test_inputs_are_padded_with_nobodys_tokens() -> None:
    shape = Shape(8, 5, 8)
    values = torch.tensor(Inputs.values(prefill([2, 3]), shape))
    inputs = Inputs.of(values, shape)
    assert inputs.tokens_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert inputs.requests_T.tolist() == [0, 0, 1, 1, 1, 5, 5, 5]
    assert inputs.places_T.tolist() == [10, 11, 0, 1, 2, 0, 1, 2]
    assert inputs.rows.tolist() == [2, 1, 0, 0, 0, 0]
    assert inputs.seq_lens.tolist() == [12, 3, 0, 0, 0, 3]
    assert inputs.qo_indptr.tolist() == [0, 2, 5, 5, 5, 5, 8]
    assert inputs.logits_rows.tolist() == [1, 4, 0, 0, 0]
    assert len(values) == shape.num_inputs == sum(map(len, vars(inputs).values()))


@pytest.mark.parametrize(
    ("extend_lens", "expected"),
    [
        ([300], Shape(512, 8, 512)),
        ([30] * 8, Shape(256, 8, 256)),
        ([30] * 9, Shape(512, 64, 256)),
        ([30] * 64, Shape(2048, 64, 256)),
        ([200] * 4, Shape(1024, 64, 256)),
        ([513], None),
        ([30] * 65, None),
        ([257] * 3, None),
        ([1] * 64, Shape(256, 64, 256)),
    ],
)
def test_the_first_shape_that_holds_a_batch(extend_lens: list[int], expected: Shape | None) -> None:
    batch = prefill(extend_lens)
    found = next((shape for shape in SHAPES if shape.holds(batch)), None)
    assert found == expected


@pytest.mark.parametrize(
    ("extend_lens", "reason"),
    [
        ([30] * 64, None),
        ([2049], "more tokens than any captured"),
        ([1] * 65, "more requests than captured"),
        ([600], "a longer prompt than any captured"),
    ],
)
def test_why_a_prefill_runs_eagerly(extend_lens: list[int], reason: str | None) -> None:
    graphs = ExtendGraphRunner.__new__(ExtendGraphRunner)  # without a GPU to capture on
    graphs.shapes, graphs.counters = list(SHAPES), Counter()
    batch = prefill(extend_lens)
    assert (graphs.shape_of(batch) is None) == (reason is not None)
    every_row = replace(batch, logits_rows=None)
    assert graphs.shape_of(every_row) is None
    assert graphs.shape_of(replace(batch, forward_mode=ForwardMode.TARGET_VERIFY)) is None
    counted = GraphStats.of(graphs.counters).fallbacks
    assert set(counted) == {one for one in (reason, "logits of every token") if one is not None}


def test_nobodys_tokens_are_no_longer_than_a_request_may_be() -> None:
    for many in (False, True):
        for tokens in range(1, (MANY if many else FEW)[-1].tokens + 1):
            lens = [tokens // 64] * 64
            lens[0] += tokens - sum(lens)
            batch = prefill([one for one in lens if one] if many else [tokens])
            found = next((shape for shape in SHAPES if shape.holds(batch)), None)
            if found is not None:
                assert found.tokens - tokens <= found.width
