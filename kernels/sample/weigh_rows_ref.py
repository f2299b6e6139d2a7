"""Tokens and weights from logits in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.sample.sample_rows_ref import (
    LEAST_WEIGHT,
    invert_cdf,
    kept_weights,
    row_params,
)
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces


def weigh_rows(logits_RV: Tensor, table: ChoiceTable, places: DrawPlaces, stream: int) -> Tensor:
    params = row_params(table, places, stream, logits_RV.shape[1])
    weights_RV = kept_weights(logits_RV, params.filters)
    weights_RV.masked_fill_(weights_RV < LEAST_WEIGHT, 0.0)
    best_R = logits_RV.argmax(-1)
    tokens_R = torch.where(params.greedy, best_R, invert_cdf(weights_RV, params.uniforms))
    one_hot_RV = torch.zeros_like(weights_RV).scatter_(1, best_R[:, None], 1.0)
    logits_RV.copy_(torch.where(params.greedy[:, None], one_hot_RV, weights_RV))
    return tokens_R
