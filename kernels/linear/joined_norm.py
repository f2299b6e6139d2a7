"""The input of EAGLE-3's layer: embedding and feature, each normed, side by side."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import joined_norm_ref


def joined_norm(
    embedding: Tensor,
    ids_T: Tensor,
    features_TH: Tensor,
    embedding_gain: Tensor,
    feature_gain: Tensor,
    eps: float,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """``cat(rms_norm(embedding[ids], embedding_gain), rms_norm(features, feature_gain))``.

    embedding: [V, H]; ids_T: int64 [T]; features_TH: [T, H], rows contiguous; gains: [H], all of
    one dtype -> [T, 2 H]. Any device; Triton on CUDA.
    """
    given = embedding, ids_T, features_TH, embedding_gain, feature_gain, eps
    if use_triton(backend, features_TH):
        from specengine.kernels.linear import joined_norm_triton

        return joined_norm_triton.joined_norm(*given)
    return joined_norm_ref.joined_norm(*given)
