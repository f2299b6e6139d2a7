"""Embedding and feature, normed, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.linear.norm_ref import rms_norm


def joined_norm(
    embedding: Tensor,
    ids_T: Tensor,
    features_TH: Tensor,
    embedding_gain: Tensor,
    feature_gain: Tensor,
    eps: float,
) -> Tensor:
    embedded = rms_norm(embedding[ids_T], embedding_gain, eps)
    return torch.cat([embedded, rms_norm(features_TH, feature_gain, eps)], dim=-1)
