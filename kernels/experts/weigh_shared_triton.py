"""The shared expert's part of a sum, in Triton: one program a row."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.sizes import power_of_2


@triton.jit
def _weigh_shared_kernel(
    shared_ptr,
    x_ptr,
    gate_ptr,
    out_ptr,
    stride_shared,
    stride_x,
    hidden,
    inputs,
    HAS_GATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    if HAS_GATE:
        k = tl.arange(0, INPUTS)
        gate = tl.load(gate_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    share = tl.load(shared_ptr + row * stride_shared + cols, mask=mask, other=0.0)
    dtype = shared_ptr.dtype.element_ty
    share = share.to(tl.float32)
    if HAS_GATE:
        x = tl.load(x_ptr + row * stride_x + k, mask=k < inputs, other=0.0).to(tl.float32)
        # Rounded as unfused operations round them.
        logit = tl.sum(x * gate, axis=0).to(dtype).to(tl.float32)
        weight = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
        share = (share * weight).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * hidden + cols, share, mask=mask)


def weigh_shared(shared: Tensor, x: Tensor | None, gate: Tensor | None, out: Tensor) -> None:
    rows, hidden = out.shape
    if not rows:
        return
    has_gate = x is not None and gate is not None
    given = shared if x is None else x
    inputs = given.shape[1] if has_gate else 1
    dependent = has_dependent_launch(out)
    block, wide = power_of_2(hidden), power_of_2(inputs)
    _weigh_shared_kernel[(rows,)](
        shared,
        given,
        shared if gate is None else gate,
        out,
        shared.stride(0),
        given.stride(0),
        hidden,
        inputs,
        HAS_GATE=has_gate,
        DEPENDENT=dependent,
        INPUTS=wide,
        BLOCK=block,
        num_warps=min(max(max(block, wide) // 256, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )
