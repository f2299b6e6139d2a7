"""Draws without replacement in CUDA C++ (cuda/draw_siblings.cu): a cluster a row, which it reads
once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.sample.row_cluster import BLOCKS, ClusterForm

_SOURCE = Path(__file__).parents[1] / "cuda" / "draw_siblings.cu"


def draw_siblings(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    (rows, count), vocab = uniforms_RK.shape, weights_RV.shape[1]
    tokens = torch.empty(rows, count, dtype=torch.int64, device=weights_RV.device)
    form, index = ClusterForm.of(vocab), weights_RV.device.index or 0
    defines = (*form.defines, ("COUNT", count))
    kernel = compiled(_SOURCE, "draw_siblings", defines, form.shared_bytes, index)
    kernel.launch(
        (BLOCKS, rows, 1),
        form.threads,
        form.shared_bytes,
        (weights_RV, uniforms_RK.contiguous(), tokens, vocab, weights_RV.stride(0)),
    )
    return tokens
