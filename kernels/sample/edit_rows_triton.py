"""Edits of logits in Triton: programs of rows without edits end at once."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.sample.types import DraftedNodes, EditTables

_BLOCK = 2048


@triton.jit(do_not_specialize=["nodes", "each"])
def _edit_rows_kernel(
    logits_ptr, slots_ptr, penalties_ptr, held_until_ptr, bias_ptr, counts_ptr, flags_ptr,
    rows_ptr, starts_ptr, tokens_ptr, depths_ptr, mask_ptr, vocab, nodes, each,
    FIRST: tl.constexpr, HAS_DEPTHS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """each: rows of a request, those of its last nodes. FIRST: of the nodes that count."""
    row = tl.program_id(0).to(tl.int64)
    request, node = row // each, row % each + nodes - each
    slot = tl.load(slots_ptr + tl.load(rows_ptr + request))
    if slot > 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < vocab
        at = slot * vocab + place
        count = tl.load(counts_ptr + at, mask=inside, other=0.0)
        for other in range(FIRST, nodes):
            is_above = other <= node
            if HAS_MASK:
                is_above = tl.load(mask_ptr + row * nodes + other) != 0
            token = tl.load(tokens_ptr + request * nodes + other)
            count += ((place == token) & is_above).to(tl.float32)
        flags = tl.load(flags_ptr + at, mask=inside, other=0)
        x = tl.load(logits_ptr + row * vocab + place, mask=inside, other=0.0)
        x += tl.load(bias_ptr + at, mask=inside, other=0.0)
        frequency = tl.load(penalties_ptr + slot * 3)
        presence = tl.load(penalties_ptr + slot * 3 + 1)
        repetition = tl.load(penalties_ptr + slot * 3 + 2)
        scaled = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where((count > 0) | (flags & 1 != 0), scaled, x)
        x = (x - frequency * count) - presence * (count > 0).to(tl.float32)
        position = tl.load(starts_ptr + request)
        position += tl.load(depths_ptr + row) if HAS_DEPTHS else node
        is_held = position < tl.load(held_until_ptr + slot)
        x = tl.where(is_held & (flags & 2 != 0), float("-inf"), x)
        tl.store(logits_ptr + row * vocab + place, x, mask=inside)


def edit_rows_(logits_RV: Tensor, tables: EditTables, drafted: DraftedNodes) -> Tensor:
    rows, vocab = logits_RV.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _edit_rows_kernel[(rows, triton.cdiv(vocab, block))](
        logits_RV,
        tables.slots,
        tables.penalties,
        tables.held_until,
        tables.bias,
        tables.counts,
        tables.flags,
        drafted.rows_B,
        drafted.starts_B,
        drafted.tokens_BN,
        drafted.rows_B if drafted.depths_R is None else drafted.depths_R,
        drafted.rows_B if drafted.mask_BMN is None else drafted.mask_BMN,
        vocab,
        drafted.tokens_BN.shape[1],
        rows // len(drafted.rows_B),
        FIRST=int(drafted.has_root),
        HAS_DEPTHS=drafted.depths_R is not None,
        HAS_MASK=drafted.mask_BMN is not None,
        BLOCK=block,
        # A product added in one rounding would not be what other devices give.
        enable_fp_fusion=False,
    )
    return logits_RV


@triton.jit(do_not_specialize=["nodes"])
def _count_tokens_kernel(
    counts_ptr, slots_ptr, rows_ptr, tokens_ptr, last_ptr, vocab, nodes
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + tl.load(rows_ptr + request))
    if slot > 0:
        for node in range(0, tl.load(last_ptr + request).to(tl.int32) + 1):
            token = tl.load(tokens_ptr + request * nodes + node)
            tl.atomic_add(counts_ptr + slot * vocab + token, 1.0, sem="relaxed")


def count_tokens_(tables: EditTables, rows_B: Tensor, tokens_BN: Tensor, last_B: Tensor) -> None:
    _count_tokens_kernel[(len(rows_B),)](
        tables.counts,
        tables.slots,
        rows_B,
        tokens_BN,
        last_B,
        tables.counts.shape[1],
        tokens_BN.shape[1],
        num_warps=1,
    )
