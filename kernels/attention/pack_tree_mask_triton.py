"""Masks of trees, a bit a key, in Triton: a program takes a run of bytes of one request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@triton.jit(do_not_specialize=["nodes", "past"])
def _pack_tree_mask_kernel(
    mask_ptr, counts_ptr, lens_ptr, starts_ptr, out_ptr, nodes, past, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + request)
    keys = tl.load(lens_ptr + request)
    places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = count * keys
    if tl.program_id(1).to(tl.int64) * BLOCK * 8 >= total:
        return
    first = keys - count - past
    mask_ptr += request * nodes * (nodes + past)
    packed = tl.zeros([BLOCK], dtype=tl.int32)
    for bit in tl.static_range(8):
        i = places * 8 + bit
        query = i // keys
        node = i - query * keys - first
        real = i < total
        in_tree = real & (node >= 0)
        seen = tl.load(mask_ptr + query * (nodes + past) + node, mask=in_tree, other=0) != 0
        packed |= ((seen | (node < 0)) & real).to(tl.int32) << bit
    starts = tl.load(starts_ptr + request)
    tl.store(out_ptr + starts + places, packed.to(tl.uint8), mask=places * 8 < total)


def pack_tree_mask(
    mask_BNM: Tensor,
    num_queries_B: Tensor,
    seq_lens_B: Tensor,
    starts_B: Tensor,
    out: Tensor,
    most: int,
) -> None:
    requests, nodes, columns = mask_BNM.shape
    _pack_tree_mask_kernel[(requests, triton.cdiv(most, _BLOCK))](
        mask_BNM.view(torch.uint8),
        num_queries_B,
        seq_lens_B,
        starts_B,
        out,
        nodes,
        columns - nodes,
        BLOCK=_BLOCK,
    )
