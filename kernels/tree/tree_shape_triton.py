"""Trees that are given by their parents, in Triton: a program a few nodes."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.tree.tree_build_triton import climb
from specengine.kernels.tree.types import DraftTree

_ROWS = 16  # nodes of a program


@triton.jit(do_not_specialize=["levels"])
def _tree_shape_kernel(
    roots_ptr,
    nodes_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    mask_ptr,
    stride_request,
    stride_kind,
    nodes,
    levels,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    exists = rows < nodes
    given_ptr = nodes_ptr + request * stride_request
    token = tl.load(given_ptr + rows, mask=exists, other=0)
    token = tl.where(rows == 0, tl.load(roots_ptr + request), token)
    above_ptr = given_ptr + stride_kind
    out = request * nodes + rows
    tl.store(tokens_ptr + out, token, mask=exists)
    tl.store(parents_ptr + out, tl.load(above_ptr + rows, mask=exists, other=0), mask=exists)
    depth, mask = climb(above_ptr, rows, cols, exists, levels)
    tl.store(depths_ptr + out, depth, mask=exists)
    cells = out[:, None] * nodes + cols[None, :]
    tl.store(mask_ptr + cells, mask.to(tl.uint8), mask=exists[:, None] & (cols < nodes)[None, :])


def tree_shape(roots_B: Tensor, nodes_B2M: Tensor, num_nodes: int, num_steps: int) -> DraftTree:
    batch_size = len(roots_B)
    tree = DraftTree.unset(batch_size, num_nodes, roots_B.device)
    block = triton.next_power_of_2(num_nodes)
    rows = min(block, _ROWS)
    _tree_shape_kernel[(batch_size, triton.cdiv(num_nodes, rows))](
        roots_B,
        nodes_B2M,
        tree.tokens_BN,
        tree.parents_BN,
        tree.depths_BN,
        tree.mask_BNN.view(torch.uint8),
        *nodes_B2M.stride()[:2],
        num_nodes,
        num_steps,
        ROWS=rows,
        BLOCK_N=block,
        num_warps=1,
    )
    return tree
