"""Keeps one new row of each request, in Triton: a program a request."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["width"])
def _keep_rows_kernel(
    table_ptr, rows_ptr, new_ptr, chosen_ptr, width, hidden, stride_table, stride_new,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + request)
    mask = cols < tl.where(row != 0, hidden, 0)
    source = new_ptr + (request * width + tl.load(chosen_ptr + request)) * stride_new
    x = tl.load(source + cols, mask=mask)
    tl.store(table_ptr + row * stride_table + cols, x, mask=mask)


def keep_rows(table: Tensor, rows_B: Tensor, new_TH: Tensor, chosen_B: Tensor) -> None:
    hidden = new_TH.shape[1]
    _keep_rows_kernel[(len(rows_B),)](
        table,
        rows_B,
        new_TH,
        chosen_B,
        new_TH.shape[0] // len(rows_B),
        hidden,
        table.stride(0),
        new_TH.stride(0),
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=4,
    )
