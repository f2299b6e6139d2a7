"""The last row of each request of a batch, as a batch of its own, and whether others are read."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from specengine.core.batch import ForwardBatch, ModelWorkerBatch
from specengine.core.forward_mode import ForwardMode

MANY_ROWS = 64  # beyond them, products take longer for each row


def reads_last_rows(batch: ModelWorkerBatch) -> bool:
    """Whether the head reads no other row of a request than its last."""
    if batch.logits_rows is None or batch.tree is not None:
        return False
    ends = set(accumulate(batch.extend_lens))
    return all(row + 1 in ends for row in batch.logits_rows)


def keep_last(batch: ForwardBatch) -> None:
    """Let the model leave out every row but the last of each request. batch: planned; as
    last_rows_of takes it."""
    batch.kept_rows, batch.last = batch.qo_indptr[1:] - 1, last_rows_of


def last_rows_of(batch: ForwardBatch) -> ForwardBatch:
    """Requests that decode the last token of those that `batch` writes, planned: row b attends as
    the last row of request b does there, once K and V of all rows are written. batch: of requests
    with at least one token each, without a tree."""
    assert batch.tree is None, "the last row of a tree sees its ancestors alone"
    last_B = batch.qo_indptr[1:] - 1
    count = batch.batch_size
    pairs = zip(batch.prefix_lens_cpu, batch.extend_lens_cpu, strict=True)
    last = replace(
        batch,
        forward_mode=ForwardMode.DECODE,
        num_tokens=count,
        input_ids=batch.input_ids.index_select(0, last_B),
        positions=batch.positions.index_select(0, last_B),
        out_cache_loc=batch.out_cache_loc.index_select(0, last_B),
        prefix_lens=batch.seq_lens - 1,
        extend_lens=torch.ones_like(batch.extend_lens),
        qo_indptr=torch.arange(count + 1, device=last_B.device),
        prefix_lens_cpu=[prefix + extend - 1 for prefix, extend in pairs],
        extend_lens_cpu=[1] * count,
        logits_rows=None,
        attn_plan=None,
        prompts=None,
        kept_rows=None,
        last=None,
        layer_features=[],
        features=None,
    )
    last.attn_backend.init_forward_metadata(last)
    return last
