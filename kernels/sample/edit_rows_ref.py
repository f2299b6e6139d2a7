"""Edits of logits in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.sample.types import (
    ENDS,
    FREQUENCY,
    IN_PROMPT,
    PRESENCE,
    REPETITION,
    DraftedNodes,
    EditTables,
)


def edit_rows_(logits_RV: Tensor, tables: EditTables, drafted: DraftedNodes) -> Tensor:
    nodes = drafted.tokens_BN.shape[1]
    each = len(logits_RV) // len(drafted.rows_B)  # rows of a request, those of its last nodes
    slots_R = tables.slots[drafted.rows_B].repeat_interleave(each)
    counts = tables.counts[slots_R]
    counts.scatter_add_(1, *_above(drafted, each, counts.dtype))
    flags = tables.flags[slots_R]
    frequency, presence, repetition = (
        tables.penalties[slots_R, index, None] for index in (FREQUENCY, PRESENCE, REPETITION)
    )
    edited = logits_RV + tables.bias[slots_R]
    generated = counts > 0
    scaled = torch.where(edited > 0, edited / repetition, edited * repetition)
    edited = torch.where(generated | (flags & IN_PROMPT > 0), scaled, edited)
    edited = edited - frequency * counts - presence * generated
    depths_R = drafted.depths_R
    if depths_R is None:
        depths_R = torch.arange(len(slots_R), device=slots_R.device) % each + nodes - each
    position_R = drafted.starts_B.repeat_interleave(each) + depths_R
    is_held = (position_R < tables.held_until[slots_R])[:, None]
    edited = edited.masked_fill(is_held & (flags & ENDS > 0), float("-inf"))
    return logits_RV.copy_(edited.where((slots_R > 0)[:, None], logits_RV))


def _above(drafted: DraftedNodes, each: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of all nodes of the request of each row, and 1 where they count: [R, N] both. each:
    rows of a request."""
    size, nodes = drafted.tokens_BN.shape
    mask = drafted.mask_BMN
    if mask is None:
        ones = torch.ones(nodes, nodes, dtype=torch.bool, device=drafted.tokens_BN.device)
        mask = ones.tril()[nodes - each :].expand(size, -1, -1)
    counts = torch.arange(nodes, device=mask.device) >= int(drafted.has_root)
    on_path = (mask & counts).reshape(size * each, nodes)
    return drafted.tokens_BN.repeat_interleave(each, dim=0), on_path.to(dtype)


def count_tokens_(tables: EditTables, rows_B: Tensor, tokens_BN: Tensor, last_B: Tensor) -> None:
    slots_B = tables.slots[rows_B]
    nodes = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    counts = (nodes <= last_B[:, None]) & (slots_B > 0)[:, None]
    places = slots_B[:, None].expand_as(tokens_BN), tokens_BN
    tables.counts.index_put_(places, counts.to(tables.counts.dtype), accumulate=True)
