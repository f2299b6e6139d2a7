"""Edits logits as requests ask for it: bias, penalties, and tokens that would end them too soon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import edit_rows_ref
from specengine.kernels.dispatch import Backend, use_triton

FREQUENCY, PRESENCE, REPETITION = range(3)
IN_PROMPT, ENDS = 1, 2


@dataclass(frozen=True)
class EditTables:
    """By slot, of which few requests need one; slot 0 edits nothing."""

    slots: Tensor  # int64 [num_rows], of each row of the page table
    penalties: Tensor  # float32 [S, 3], REPETITION 1 where off
    held_until: Tensor  # int64 [S], the position from which tokens may end the request
    bias: Tensor  # float32 [S, V]
    counts: Tensor  # float32 [S, V], of tokens generated, the last one included
    flags: Tensor  # uint8 [S, V], IN_PROMPT and ENDS

    @classmethod
    def of(cls, num_rows: int, num_slots: int, vocab: int, device: torch.device) -> EditTables:
        bias = torch.zeros(num_slots, vocab, device=device)
        return cls(
            slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
            penalties=torch.zeros(num_slots, 3, device=device),
            held_until=torch.zeros(num_slots, dtype=torch.int64, device=device),
            bias=bias,
            counts=torch.zeros_like(bias),
            flags=torch.zeros_like(bias, dtype=torch.uint8),
        )


@dataclass(frozen=True)
class Drafted:
    """N nodes of B requests, whose tokens count where they stand above a row. Rows are those of
    each request's last nodes, as many of each: of chains all or the last, of trees as the mask has
    them."""

    rows_B: Tensor  # int64, of the page table
    starts_B: Tensor  # int64, position of the token that rows of depth 0 decide
    tokens_BN: Tensor  # int64, contiguous
    depths_R: Tensor | None = None  # int64, contiguous: from starts_B on; None: chains
    mask_BMN: Tensor | None = None  # bool, contiguous: ancestors and self; None: chains
    has_root: bool = True  # node 0 is the root, and counted by the tables


def edit_rows_(
    logits_RV: Tensor, tables: EditTables, drafted: Drafted, *, backend: Backend = "auto"
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
        from specengine.kernels import edit_rows_triton

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
        from specengine.kernels import edit_rows_triton

        edit_rows_triton.count_tokens_(tables, rows_B, tokens_BN, last_B)
        return
    edit_rows_ref.count_tokens_(tables, rows_B, tokens_BN, last_B)
