"""What a captured prefill takes from the host."""

from __future__ import annotations

import torch

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.runner.extend_graphs import MAX_REQUESTS, Inputs


def test_inputs_are_padded_with_nobodys_tokens() -> None:
    batch = ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.tensor([5, 6, 7, 8, 9]),
        req_pool_indices=[3, 1],
        prefix_lens=[10, 0],
        extend_lens=[2, 3],
        logits_rows=[1, 4],
        sampling=None,
    )
    values = torch.tensor(Inputs.values(batch, 8))
    inputs = Inputs.of(values, 8)
    nobody = MAX_REQUESTS
    assert inputs.tokens_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert inputs.requests_T.tolist() == [0, 0, 1, 1, 1, nobody, nobody, nobody]
    assert inputs.places_T.tolist() == [10, 11, 0, 1, 2, 0, 1, 2]
    assert inputs.rows.tolist() == [3, 1] + [0] * (MAX_REQUESTS - 1)
    assert inputs.rows[nobody] == 0
    assert inputs.seq_lens.tolist() == [12, 3] + [0] * (MAX_REQUESTS - 2) + [3]
    assert inputs.qo_indptr.tolist() == [0, 2] + [5] * (MAX_REQUESTS - 1) + [8]
    assert inputs.logits_rows.tolist() == [1, 4] + [0] * (MAX_REQUESTS - 2)
    assert len(values) == sum(map(len, vars(inputs).values()))
