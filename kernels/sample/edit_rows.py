"""Edits logits as requests ask for it: bias, penalties, and tokens that would end them too soon."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import edit_rows_ref
from specengine.kernels.sample.types import (
    DraftedNodes,
    EditTables,
)


def edit_rows_(
    logits_RV: Tensor, tables: EditTables, drafted: DraftedNodes, *, backend: Backend = "auto"
) -> Tensor:
    """In place, for the rows of requests that have a slot, with `count` the tables' and one for
    each node but the root that lies on the row's path::

        logits += bias
        where count > 0 or the token is in the prompt: logits /= repetition, or *= it below 0
        logits = logits - frequency * count - presence * (count > 0)
        where the position lies below held_until: logits of tokens that end the request = -inf

    logits_RV: float32, contiguous, R = B * M. Any device; Triton on CUDA.
    """
    if use_triton(backend, logits_RV):
        from specengine.kernels.sample import edit_rows_triton

        return edit_rows_triton.edit_rows_(logits_RV, tables, drafted)
    return edit_rows_ref.edit_rows_(logits_RV, tables, drafted)


def count_tokens_(
    tables: EditTables,
    rows_B: Tensor,
    tokens_BN: Tensor,
    last_B: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """``counts[slot, tokens[b, n]] += 1`` for n up to last[b], of requests that have a slot.

    tokens_BN: int64, contiguous; last_B: int64, below N.
    """
    if use_triton(backend, tokens_BN):
        from specengine.kernels.sample import edit_rows_triton

        edit_rows_triton.count_tokens_(tables, rows_B, tokens_BN, last_B)
        return
    edit_rows_ref.count_tokens_(tables, rows_B, tokens_BN, last_B)
