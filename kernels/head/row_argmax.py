"""The largest value of each row."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.head.types import Meeting


def row_argmax(
    x_RV: Tensor, meeting: Meeting, ids: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x.argmax(-1)``, the first among equals; ``ids`` of that, where given.

    x_RV: float32, float16 or bfloat16, rows contiguous, no NaN; ids: int64 [V] -> int64 [R]. Any
    device; Triton on CUDA, for as many rows as the meeting has.
    """
    if use_triton(backend, x_RV) and x_RV.shape[0] <= len(meeting.keys):
        from specengine.kernels.head import row_argmax_triton

        return row_argmax_triton.row_argmax(x_RV, meeting, ids)
    best = x_RV.argmax(-1)
    return best if ids is None else ids[best]
