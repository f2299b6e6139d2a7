"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.dispatch import Backend, use_triton


def embed_rows(weight: Tensor, ids_T: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``weight[ids]``: PyTorch's kernel goes through few ids one after the other, 5.8 us for eight.

    weight: [V, H], rows contiguous; ids_T: int64 [T], strided if need be, all in 0 .. V - 1 ->
    [T, H]. Any device; Triton on CUDA.
    """
    if use_triton(backend, ids_T):
        from specengine.kernels.head import embed_rows_triton

        return embed_rows_triton.embed_rows(weight, ids_T)
    return F.embedding(ids_T, weight)
