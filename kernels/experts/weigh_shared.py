"""The shared expert's output as one more part of what the chosen experts give."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend
from specengine.kernels.experts import weigh_shared_ref


def weigh_shared(
    shared: Tensor,
    x: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Writes for each row t::

        out[t] = sigmoid(gate @ x[t]) * shared[t]     # each step rounded to the dtype of x

    shared: [T, H]; x: [T, I] of shared's dtype and gate: [1, I], both or neither: without them
    out is shared; out: float32 [T, H]. A row's bits do not depend on other rows. Any device; Triton
    on CUDA, where it is one kernel that reads only the gate before the kernel ahead has ended, and
    lets the next one start behind its own wait.
    """
    _weigh_shared(shared, x, gate, out, backend=backend)


class _WeighShared(CustomOp):
    torch = staticmethod(weigh_shared_ref.weigh_shared)

    @staticmethod
    def triton(shared: Tensor, x: Tensor | None, gate: Tensor | None, out: Tensor) -> None:
        from specengine.kernels.experts import weigh_shared_triton

        weigh_shared_triton.weigh_shared(shared, x, gate, out)

    @staticmethod
    def takes_triton(shared: Tensor, x: Tensor | None, gate: Tensor | None, out: Tensor) -> bool:
        if not out.is_contiguous() or shared.stride(1) != 1:
            return False
        if x is None or gate is None:
            return True
        same = x.dtype == gate.dtype == shared.dtype
        return same and x.stride(1) == 1 and gate.is_contiguous() and x.shape[1] <= _MOST_INPUTS


_MOST_INPUTS = 32768  # that a program holds
_weigh_shared = _WeighShared()
