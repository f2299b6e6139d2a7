"""The head and the choice of the best token in CUDA C++ (cuda/head_best.cu): one launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels import rehearsal
from specengine.kernels.cuda.program import Kernel, compiled
from specengine.kernels.dispatch import MOST_SHARED, multiprocessors
from specengine.kernels.head_best import MAX_ROWS

_SOURCE = Path(__file__).parent / "cuda" / "head_best.cu"
_TILE = 16  # outputs, as in the source
_WARPS = 8
_SLICES = (2, 3, 1)  # chunks of a stage, the best first; measured on an H200 (head-best)
_MOST_STAGES = 8

_MOST_HIDDEN = 4096  # a lane holds what it norms of a row, and would not of a wider one


@dataclass(frozen=True)
class Form:
    """What is decided at compile time by rows and depth."""

    eights: int  # of rows
    chunks: int  # of the depth, 32 values each
    slice: int  # chunks of a stage

    @classmethod
    def of(cls, rows: int, hidden: int) -> Form:
        chunks = hidden // 32
        return cls(-(-rows // 8), chunks, next(n for n in _SLICES if chunks % n == 0))

    @property
    def stages(self) -> int:
        """Of a warp's ring, as many as there is room for."""
        room = MOST_SHARED - self._beside_rings
        return min(room // (_WARPS * self._stage_bytes), _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return self._beside_rings + _WARPS * self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return _TILE * 64 * self.slice

    @property
    def _beside_rings(self) -> int:
        """Rows an odd number of 64 bytes apart, and a barrier."""
        return 8 * self.eights * 64 * (self.chunks | 1) + 8


def takes_depth(hidden: int) -> bool:
    return hidden % 32 == 0 and hidden <= _MOST_HIDDEN


def head_best(
    x: Tensor,
    weight: Tensor,
    slots: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    ids: Tensor | None,
) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty(rows, dtype=torch.int64, device=x.device)

    def kernel_of(form: Form) -> Kernel:
        defines = (
            ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
            ("NT", form.eights),
            ("CHUNKS", form.chunks),
            ("SLICE", form.slice),
            ("STAGES", form.stages),
            ("WARPS", _WARPS),
            ("NORM", int(norm_weight is not None)),
            ("IDS", int(ids is not None)),
        )
        return compiled(_SOURCE, "head_best", defines, form.shared_bytes, x.device.index or 0)

    if rehearsal.current() is not None:
        # Few sizes of batches are rehearsed, and others need other forms.
        for most in range(8, MAX_ROWS + 1, 8):
            kernel_of(Form.of(most, hidden))
    form = Form.of(rows, hidden)
    kernel_of(form).launch(
        (multiprocessors(x.device), 1, 1),
        32 * _WARPS,
        form.shared_bytes,
        (x, norm_weight, weight, ids, slots, out, rows, len(weight), x.stride(0), eps),
    )
    return out
