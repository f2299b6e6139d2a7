"""All decoder layers in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.linear import few_row_ref
from specengine.kernels.linear.types import StackKV, StackOutput, StackWeights


def decoder_stack(
    x: Tensor,
    weights: StackWeights,
    kv: StackKV,
    batch: PagedBatch,
    feature_layers: Sequence[int],
) -> StackOutput:
    shape, eps = weights.shape, weights.eps
    counts = [shape.heads, shape.kv_heads, shape.kv_heads]
    layer_features = []
    for number, layer in enumerate(weights.layers):
        qkv = few_row_ref.norm_linear(x, layer.input_gain, eps, layer.qkv, None, None)
        split = torch.split(qkv, [count * shape.head_dim for count in counts], dim=-1)
        q, k, v = (part.view(len(x), -1, shape.head_dim) for part in split)
        heads = rope_attention(
            q, k, v, weights.cos_sin, kv.k[number], kv.v[number], kv.loc, batch, weights.scale,
            backend="torch",
        )  # fmt: skip
        x = few_row_ref.linear_add(heads.flatten(1), layer.out, x)
        gates = few_row_ref.norm_gated_linear(x, layer.gain, eps, layer.gate_up)
        x = few_row_ref.linear_add(gates, layer.down, x)
        if number in feature_layers:
            layer_features.append(x)
    return StackOutput(x, layer_features)
