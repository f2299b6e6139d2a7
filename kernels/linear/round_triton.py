"""Rounding a row to FP8 in the program that made it.

ROUNDS is what rounded.rounding_of says.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.linear.quantised import FP8
from specengine.kernels.linear.rounded import WHOLE_ROWS


@triton.jit
def wait_for_rows(EARLY: tl.constexpr):
    """For the kernel ahead, before its rows are read (programmatic dependent launch). EARLY: lets
    the kernel behind start at once, which must be as norm.rms_norm says of awaited: a product, that
    fetches its weight meanwhile. Products of rounded rows are."""
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        # In this order: what starts behind this kernel may read what was written before it.
        gdc_launch_dependents()


@triton.jit
def store_rounded(
    made,
    codes_ptr,
    scale_ptr,
    row,
    width,
    cols,
    mask,
    ROUNDS: tl.constexpr,
    SIZE: tl.constexpr,
    start=0,
):
    """made: SIZE values of a row, of any number of dimensions, zeros where not mask, rounded to the
    dtype that they are stored in. Where ROUNDS is 1 they are the whole row, and cols is the place
    of each; with groups they are those from `start` on, where a group begins. The operations of
    fp8_linear_triton's `_quantise_kernel`, so that the bits are the same."""
    made = made.to(tl.float32)
    if ROUNDS == 1:
        scale = tl.maximum(tl.max(tl.abs(made)) / 448.0, 1e-12)
        codes = made / scale
        tl.store(scale_ptr + row, scale)
    else:
        made = tl.reshape(made, (SIZE // ROUNDS, ROUNDS))
        group = start // ROUNDS + tl.arange(0, SIZE // ROUNDS)
        cols = group[:, None] * ROUNDS + tl.arange(0, ROUNDS)[None, :]
        mask = cols < width
        scale = tl.maximum(tl.max(tl.abs(made), axis=1) / 448.0, 1e-12)
        codes = made / scale[:, None]
        parts = width // ROUNDS
        tl.store(scale_ptr + row * parts + group, scale, mask=group < parts)
    codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
    tl.store(codes_ptr + row * width + cols, codes.to(codes_ptr.dtype.element_ty), mask=mask)


def room_for(x: Tensor, columns: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Codes [T, columns] and scales to fill; hardly anything where nothing is rounded."""
    rows = len(x) if rounds else 1
    codes = torch.empty((rows, columns if rounds else 1), dtype=FP8, device=x.device)
    parts = columns // rounds if rounds > WHOLE_ROWS else 1
    return codes, torch.empty((rows, parts), dtype=torch.float32, device=x.device)
