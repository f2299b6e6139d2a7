"""Prompts as batches on the host, and the tolerance of forwards that compute the same."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.tree import Tree


def extend(
    tokens: list[list[int]],
    prefix_lens: list[int] | None = None,
    mode: ForwardMode = ForwardMode.EXTEND,
    tree: Tree | None = None,
) -> ModelWorkerBatch:
    """New tokens of requests 1, 2, ..., every row of which gets logits."""
    return ModelWorkerBatch(
        forward_mode=mode,
        input_ids=torch.tensor([t for one in tokens for t in one], dtype=torch.int64),
        req_pool_indices=[i + 1 for i in range(len(tokens))],
        prefix_lens=prefix_lens or [0] * len(tokens),
        extend_lens=[len(one) for one in tokens],
        logits_rows=None,
        sampling=None,
        tree=tree,
    )


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
