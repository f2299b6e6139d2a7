"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend


def embed_rows(weight: Tensor, ids_T: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``weight[ids]``: PyTorch's kernel goes through few ids one after the other, 5.8 us for eight.

    weight: [V, H], rows contiguous; ids_T: int64 [T], strided if need be, all in 0 .. V - 1 ->
    [T, H]. Any device; Triton on CUDA.
    """
    out: Tensor = _embed_rows(weight, ids_T, backend=backend)
    return out


def _plain(weight: Tensor, ids_T: Tensor) -> Tensor:
    return F.embedding(ids_T, weight)


class _EmbedRows(CustomOp):
    schema = "embed_rows(Tensor weight, Tensor ids_T) -> Tensor"
    torch = staticmethod(_plain)

    @staticmethod
    def fake(weight: Tensor, ids_T: Tensor) -> Tensor:
        return weight.new_empty(ids_T.shape[0], weight.shape[1])

    @staticmethod
    def triton(weight: Tensor, ids_T: Tensor) -> Tensor:
        from specengine.kernels.head import embed_rows_triton

        return embed_rows_triton.embed_rows(weight, ids_T)


_embed_rows = _EmbedRows()
