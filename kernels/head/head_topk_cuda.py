"""The head with the best tokens and the log-sum-exp by block in CUDA C++ (cuda/head_topk.cu)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import multiprocessors
from specengine.kernels.head.head_stream import TILE, WARPS, HeadForm, rows_to_compile_for
from specengine.kernels.head.types import BlockPartials

MAX_TOPK = 32  # a lane each
_SOURCE = Path(__file__).parents[1] / "cuda" / "head_topk.cu"
_MIN_STAGES = 4  # of a ring that is worth it
_MAX_TURNS = 32  # a lane looks through four logits a turn, which it has in registers


def has_room(x: Tensor, weight: Tensor) -> bool:
    """Whether a block can keep its logits beside rings that are deep enough."""
    turns = _turns(x, weight)
    return turns <= _MAX_TURNS and _form(len(x), x, turns).stages >= _MIN_STAGES


def head_topk(
    x: Tensor, weight: Tensor, topk: int, norm_weight: Tensor | None, eps: float
) -> BlockPartials:
    rows = len(x)
    blocks, turns = multiprocessors(x.device), _turns(x, weight)
    keys = torch.empty(rows, blocks, topk, dtype=torch.int64, device=x.device)
    sums = torch.empty(rows, blocks, 2, dtype=torch.float32, device=x.device)
    for count in rows_to_compile_for(x):
        form = _form(count, x, turns)
        if form.stages < _MIN_STAGES:
            continue  # while precompiling: so many rows take another path
        defines = (*form.defines(x, norm_weight), ("TURNS", turns))
        kernel = compiled(_SOURCE, "head_topk", defines, form.shared_bytes, x.device.index or 0)
    kernel.launch(
        (blocks, 1, 1),
        32 * WARPS,
        form.shared_bytes,
        (x, norm_weight, weight, keys, sums, rows, len(weight), topk, x.stride(0), eps),
    )
    return BlockPartials(keys, sums, TILE)


def _turns(x: Tensor, weight: Tensor) -> int:
    """Tiles that a warp takes at most."""
    return -(-len(weight) // (TILE * WARPS * multiprocessors(x.device)))


def _form(rows: int, x: Tensor, turns: int) -> HeadForm:
    """A block keeps its logits of each row, rows being an odd number of 8 bytes apart."""
    return HeadForm.of(rows, x.shape[1], 2 * (WARPS * turns * TILE + 4))
