"""Embedding and feature, normed, in Triton: a program a half of a row."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.sizes import power_of_2


@triton.jit
def _joined_norm_kernel(
    embedding_ptr,
    ids_ptr,
    features_ptr,
    embedding_gain_ptr,
    feature_gain_ptr,
    out_ptr,
    hidden,
    stride_ids,
    stride_embedding,
    stride_features,
    eps,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    source = features_ptr + row * stride_features
    gain_ptr = feature_gain_ptr
    if half == 0:
        source = embedding_ptr + tl.load(ids_ptr + row * stride_ids) * stride_embedding
        gain_ptr = embedding_gain_ptr
    x = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    gain = tl.load(gain_ptr + cols, mask=mask, other=0.0)
    out = (x * scale).to(gain.dtype) * gain
    tl.store(out_ptr + (row * 2 + half) * hidden + cols, out, mask=mask)


def joined_norm(
    embedding: Tensor,
    ids_T: Tensor,
    features_TH: Tensor,
    embedding_gain: Tensor,
    feature_gain: Tensor,
    eps: float,
) -> Tensor:
    rows, hidden = features_TH.shape
    out = torch.empty((rows, 2 * hidden), dtype=features_TH.dtype, device=features_TH.device)
    if rows == 0:
        return out
    dependent = has_dependent_launch(features_TH)
    _joined_norm_kernel[(rows, 2)](
        embedding,
        ids_T,
        features_TH,
        embedding_gain,
        feature_gain,
        out,
        hidden,
        ids_T.stride(0),
        embedding.stride(0),
        features_TH.stride(0),
        eps,
        DEPENDENT=dependent,
        BLOCK=power_of_2(hidden),
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
