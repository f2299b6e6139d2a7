"""The head and the choice of the best token in CUDA C++ (cuda/head_best.cu): one launch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import multiprocessors
from specengine.kernels.head.head_stream import WARPS, HeadForm, rows_to_compile_for

_SOURCE = Path(__file__).parents[1] / "cuda" / "head_best.cu"


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
    for count in rows_to_compile_for(x):
        form = HeadForm.of(count, hidden)
        defines = (*form.defines(x, norm_weight), ("IDS", int(ids is not None)))
        kernel = compiled(_SOURCE, "head_best", defines, form.shared_bytes, x.device.index or 0)
    kernel.launch(
        (multiprocessors(x.device), 1, 1),
        32 * WARPS,
        form.shared_bytes,
        (x, norm_weight, weight, ids, slots, out, rows, len(weight), x.stride(0), eps),
    )
    return out
