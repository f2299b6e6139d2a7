"""Rows of the embedding table in Triton: a program a part of a row.

It waits for all before it, and lets none behind it start before its end: kernels of the layers read
KV of earlier forwards before they wait.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from specengine.kernels.dispatch import has_dependent_launch

_BLOCK = 1024


@triton.jit
def _embed_rows_kernel(
    weight_ptr,
    ids_ptr,
    out_ptr,
    hidden,
    stride_weight,
    stride_ids,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < hidden
    if DEPENDENT:
        gdc_wait()
    source = weight_ptr + tl.load(ids_ptr + row * stride_ids) * stride_weight
    tl.store(out_ptr + row * hidden + cols, tl.load(source + cols, mask=mask), mask=mask)


def embed_rows(weight: Tensor, ids_T: Tensor) -> Tensor:
    rows, hidden = len(ids_T), weight.shape[1]
    out = torch.empty((rows, hidden), dtype=weight.dtype, device=weight.device)
    if rows == 0:
        return out
    dependent = has_dependent_launch(weight)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _embed_rows_kernel[(rows, triton.cdiv(hidden, block))](
        weight,
        ids_T,
        out,
        hidden,
        weight.stride(0),
        ids_T.stride(0),
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
