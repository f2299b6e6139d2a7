"""Tokens and weights from logits in Triton: a program a row, in passes over what it has written."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.keyed_uniform_ref import GOLDEN
from specengine.kernels.sample_rows_ref import LEAST_WEIGHT
from specengine.kernels.sample_rows_triton import (
    _MAX_BLOCK,
    _above,
    _best,
    _find,
    _floor,
    _uniform,
    _write_e,
)

if TYPE_CHECKING:
    from specengine.kernels.sample_rows import ChoiceTable, Places

_LEAST = tl.constexpr(LEAST_WEIGHT)


@triton.jit
def _cut(e_ptr, vocab, floor, BLOCK: tl.constexpr):
    """0 for what lies below the floor, or has no weight. floor: float bits."""
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        e = tl.load(e_ptr + place, mask=place < vocab, other=0.0)
        kept = (e.to(tl.int32, bitcast=True) >= floor) & (e >= _LEAST)
        tl.store(e_ptr + place, tl.where(kept, e, 0.0), mask=place < vocab)


@triton.jit
def _put_all_on(e_ptr, vocab, token, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(e_ptr + place, tl.where(place == token, 1.0, 0.0), mask=place < vocab)


@triton.jit(do_not_specialize=["nodes"])
def _weigh_rows_kernel(
    logits_ptr, words_ptr, slots_ptr, starts_ptr, depths_ptr, out_ptr, vocab, nodes, stride_logits,
    stride_slot, stride_word, HAS_DEPTHS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    words_ptr += tl.load(slots_ptr + row // nodes) * stride_slot
    temperature = tl.load(words_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    best, token = _best(logits_ptr, vocab, BLOCK)
    tl.debug_barrier()  # all have read the logits that are written over
    if temperature > 0.0:
        top_k = tl.load(words_ptr + stride_word)
        top_p = tl.load(words_ptr + 2 * stride_word).to(tl.float64, bitcast=True)
        min_p = tl.load(words_ptr + 3 * stride_word).to(tl.float64, bitcast=True).to(tl.float32)
        seed = tl.load(words_ptr + 4 * stride_word)
        position = tl.load(starts_ptr + row // nodes) + tl.load(words_ptr + 5 * stride_word)
        position += tl.load(depths_ptr + row) if HAS_DEPTHS else row % nodes
        total = _write_e(logits_ptr, logits_ptr, vocab, best, temperature, BLOCK)
        tl.debug_barrier()  # other threads of the program read what each wrote
        floor = _floor(logits_ptr, vocab, total, top_k, top_p, min_p, BLOCK)
        if floor > 0:
            total, _, _ = _above(logits_ptr, vocab, floor - 1, True, BLOCK)
        target = (_uniform(seed, position, OFFSET) * total.to(tl.float64)).to(tl.int64)
        token = _find(logits_ptr, vocab, floor, tl.minimum(target, total - 1), BLOCK)
        tl.debug_barrier()  # likewise, the other way round
        _cut(logits_ptr, vocab, floor, BLOCK)
    else:
        _put_all_on(logits_ptr, vocab, token, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))


def weigh_rows(logits_RV: Tensor, table: ChoiceTable, places: Places, stream: int) -> Tensor:
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows == 0:
        return out
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    _weigh_rows_kernel[(rows,)](
        logits_RV,
        table.words,
        places.slots_B,
        places.starts_B,
        out if places.depths_R is None else places.depths_R,
        out,
        vocab,
        places.nodes,
        logits_RV.stride(0),
        *table.words.stride(),
        HAS_DEPTHS=places.depths_R is not None,
        OFFSET=GOLDEN * (stream + 1) % 2**64,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        # A product added in one rounding would not be what other devices give.
        enable_fp_fusion=False,
    )
    return out
