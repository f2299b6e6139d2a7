"""Moves KV of accepted paths in Triton: a program takes a request and a share of one buffer."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from specengine.kernels.kv.types import KVBuffers, KVPaths

_MAX_WORDS = 512  # of a slot, in one program


@triton.jit
def _kv_move_kernel(
    addresses_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    nodes_ptr,
    accepted_ptr,
    stride_table,
    context,
    width,
    words,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    order = tl.arange(0, BLOCK_W)
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + request)
    stands = order <= tl.where(row != 0, tl.load(accepted_ptr + request), -1)
    node = tl.load(nodes_ptr + request * width + order, mask=stands, other=0)
    moves = stands & (node != order) & (length + node < context)
    table_ptr += row * stride_table + length
    source = tl.load(table_ptr + node, mask=moves, other=0).to(tl.int64)
    target = tl.load(table_ptr + order, mask=moves, other=0).to(tl.int64)
    buffer = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = moves[:, None] & (cols < words)[None, :]
    x = tl.load(buffer + source[:, None] * words + cols[None, :], mask=mask, other=0)
    # A slot may be the target of one move and the source of another: all reads come first.
    tl.debug_barrier()
    tl.store(buffer + target[:, None] * words + cols[None, :], x, mask=mask)


def kv_move(buffers: KVBuffers, paths: KVPaths) -> None:
    requests, width = paths.nodes_BW.shape
    first = buffers.tensors[0]
    words = first[0].numel() * first.itemsize // 4
    block = min(triton.next_power_of_2(words), _MAX_WORDS)
    grid = requests, len(buffers.addresses), triton.cdiv(words, block)
    _kv_move_kernel[grid](
        buffers.addresses,
        paths.req_to_token,
        paths.rows_B,
        paths.lens_B,
        paths.nodes_BW,
        paths.accepted_B,
        paths.req_to_token.stride(0),
        paths.req_to_token.shape[1],
        width,
        words,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK=block,
        num_warps=4,
    )
