"""The activation of experts in Triton, for all products of experts."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(
    gate,
    up,
    TYPE: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """float32 of gate and up -> float32, rounded to TYPE as unfused operations round it."""
    gate = gate.to(TYPE).to(tl.float32)
    up = up.to(TYPE).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        activated = gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    return activated.to(TYPE).to(tl.float32) * up
