"""The kernels of the head: the rows that they take, and what is decided at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import precompile
from specengine.kernels.cuda import program
from specengine.kernels.dispatch import MOST_SHARED, has_dependent_launch, has_much_shared

MAX_ROWS = 16  # beyond, a draft's head gains nothing (benchmarks/results, head-best)
TILE, WARPS = 16, 8  # outputs of a tile, as in cuda/head_stream.cuh; warps of a block
_SLICES = (2, 3, 1)  # chunks of a stage, the best first; measured on an H200 (head-best)
_MOST_STAGES = 8
_MOST_HIDDEN = 4096  # a lane holds what it norms of a row, and would not of a wider one


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are there and the faster choice."""
    return (
        has_dependent_launch(x)
        and has_much_shared(x)
        and can_take(x, weight)
        and program.available()
    )


def can_take(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take x [R, H] and weight [V, H]: half precision, rows of 64 bytes and
    multiples, few and not too wide."""
    rows, hidden = x.shape
    is_half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    is_aligned = all(t.stride(1) == 1 and t.data_ptr() % 16 == 0 for t in (x, weight))
    return (
        is_half
        and is_aligned
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and 0 < rows <= MAX_ROWS
        and hidden == weight.shape[1]
        and hidden % 32 == 0
        and hidden <= _MOST_HIDDEN
    )


@dataclass(frozen=True)
class HeadForm:
    """What is decided at compile time by rows and depth."""

    eights: int  # of rows
    chunks: int  # of the depth, 32 values each
    slice: int  # chunks of a stage
    extra_bytes: int  # of shared memory, behind what the stream uses

    @classmethod
    def of(cls, rows: int, hidden: int, extra_of_row: int = 0) -> HeadForm:
        chunks, eights = hidden // 32, -(-rows // 8)
        chosen = next(n for n in _SLICES if chunks % n == 0)
        return cls(eights, chunks, chosen, 8 * eights * extra_of_row)

    @property
    def stages(self) -> int:
        """Stages of a warp's ring, as many as there is room for."""
        room = MOST_SHARED - self._beside_rings
        return min(room // (WARPS * self._stage_bytes), _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return self._beside_rings + WARPS * self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return TILE * 64 * self.slice

    @property
    def _beside_rings(self) -> int:
        """Rows an odd number of 64 bytes apart, a barrier, and what comes behind."""
        return 8 * self.eights * 64 * (self.chunks | 1) + 8 + self.extra_bytes

    def defines(self, x: Tensor, norm_weight: Tensor | None) -> tuple[tuple[str, int], ...]:
        return (
            ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
            ("NT", self.eights),
            ("CHUNKS", self.chunks),
            ("SLICE", self.slice),
            ("STAGES", self.stages),
            ("WARPS", WARPS),
            ("NORM", int(norm_weight is not None)),
        )


def rows_to_compile_for(x: Tensor) -> list[int]:
    """x's, the last. While precompiling, others too: few sizes of batches are precompiled, and
    others need other forms."""
    others = range(8, MAX_ROWS + 1, 8) if precompile.current() is not None else ()
    return [*others, len(x)]
