"""How a row of values is spread over a cluster of blocks (cuda/row_cluster.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.dispatch import Backend, has_dependent_launch

BLOCKS = 8  # of a cluster: the most that every card with clusters can have
MOST_TOLD = 9  # as in the source
_WARPS = (8, 16, 32)
_MOST_PER_LANE = 32  # values in registers, beside what is worked out of them
_MOST_LENGTH = 32 * BLOCKS * _WARPS[-1] * _MOST_PER_LANE  # of a row
_FEW = 4  # rows a warp of a block: more are chosen from faster by a program each
MOST_ROWS = 65_535  # of a grid

by_itself = True  # whether "auto" is these kernels on Hopper


@dataclass(frozen=True)
class ClusterForm:
    """What is decided at compile time by the length of a row."""

    warps: int
    per_lane: int

    @classmethod
    def of(cls, length: int) -> ClusterForm:
        """With the fewest warps that hold it; `can_take` says whether any do."""
        per_warp = [-(-length // (32 * BLOCKS * warps)) for warps in _WARPS]
        pairs = zip(_WARPS, per_warp, strict=True)
        return next(cls(*pair) for pair in pairs if pair[1] <= _MOST_PER_LANE)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return ("TYPE", 0), ("CLUSTER", BLOCKS), ("WARPS", self.warps), ("PER", self.per_lane)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 8 * (2 * MOST_TOLD * (self.warps + BLOCKS) + 32 * self.per_lane)


def takes(backend: Backend, rows_RV: Tensor, most: int | None = None) -> bool:
    """Whether the kernels are asked for, or are there and chosen. most: rows, if not as few as are
    done faster by a cluster each. Raises ValueError where they are asked for what they cannot."""
    if backend == "cuda" and not can_take(rows_RV):
        raise ValueError(
            f"kernels on clusters take 1 to {MOST_ROWS} rows of float32 numbers that lie together, "
            f'no more than {_MOST_LENGTH} a row; leave the backend to "auto"'
        )
    if backend != "auto" or not by_itself:
        return backend == "cuda"
    if not (has_dependent_launch(rows_RV) and can_take(rows_RV) and program.available()):
        return False
    rows, length = rows_RV.shape
    return rows <= (_FEW * ClusterForm.of(length).warps if most is None else most)


def can_take(rows_RV: Tensor) -> bool:
    rows, length = rows_RV.shape
    is_right = rows_RV.dtype == torch.float32 and rows_RV.stride(1) == 1
    return is_right and 0 < rows <= MOST_ROWS and length <= _MOST_LENGTH
