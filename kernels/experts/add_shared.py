"""The shared expert's output, added to the parts that the chosen experts give."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend
from specengine.kernels.experts import add_shared_ref


def add_shared(
    parts: Tensor,
    shared: Tensor,
    x: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Writes into parts, for each row t, and returns them::

        share = sigmoid(gate @ x[t]) * shared[t]     # each step rounded to the dtype of x
        parts[-1, t] += share                        # in float32

    parts: float32 [P, T, H]; shared: [T, H]; x: [T, I] of shared's dtype and gate: [1, I], both or
    neither: without them share is shared[t]. A row's bits do not depend on other rows. Any device;
    Triton on CUDA, where it is one kernel that reads only the gate before the kernel ahead has
    ended, and lets the next one start behind its own wait.
    """
    _add_shared(parts, shared, x, gate, backend=backend)
    return parts


class _AddShared(CustomOp):
    torch = staticmethod(add_shared_ref.add_shared)

    @staticmethod
    def triton(parts: Tensor, shared: Tensor, x: Tensor | None, gate: Tensor | None) -> None:
        from specengine.kernels.experts import add_shared_triton

        add_shared_triton.add_shared(parts, shared, x, gate)

    @staticmethod
    def takes_triton(parts: Tensor, shared: Tensor, x: Tensor | None, gate: Tensor | None) -> bool:
        if not parts.is_contiguous() or shared.stride(1) != 1:
            return False
        if x is None or gate is None:
            return True
        same = x.dtype == gate.dtype == shared.dtype
        return same and x.stride(1) == 1 and gate.is_contiguous() and x.shape[1] <= _MOST_INPUTS


_MOST_INPUTS = 32768  # that a program holds
_add_shared = _AddShared()
