"""The products around attention of one row of GPT-OSS, which have biases: cuBLAS beside few_row.

    python -m benchmarks.kernels.output_bias

Norm, qkv and output projection of GPT-OSS-20B over the weights of several layers, a norm of the
queries in attention's place, in captured graphs that are replayed in turns. "apart" is how far the
two streams are from each other behind all layers, relative.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.fp8_products import EPS, LAYERS, captured, in_turns
from specengine.kernels.linear import few_row
from specengine.kernels.linear.norm_triton import fused_add_rms_norm, rms_norm

HIDDEN, HEADS, QKV = 2880, 4096, 5120
MOST_APART = 0.02

Layer = dict[str, Tensor]


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda").bfloat16() * size[-1] ** -0.5


def by_cublas(stream: Tensor, layers: list[Layer]) -> Tensor:
    hidden = torch.zeros_like(stream)
    for one in layers:
        normed, stream = fused_add_rms_norm(hidden, stream, one["gain"], EPS)
        qkv = F.linear(normed, one["qkv"], one["qkv_bias"])
        heads = rms_norm(qkv[:, :HEADS], one["inner"], EPS)
        hidden = F.linear(heads, one["o"], one["o_bias"])
    return stream + hidden


def by_few_row(stream: Tensor, layers: list[Layer]) -> Tensor:
    for one in layers:
        normed = rms_norm(stream, one["gain"], EPS)
        qkv = few_row.linear(normed, one["qkv"], one["qkv_bias"])
        heads = rms_norm(qkv[:, :HEADS], one["inner"], EPS)
        stream = few_row.linear_add(heads, one["o"], stream, one["o_bias"])
    return stream


def main() -> None:
    torch.manual_seed(0)
    layers = [
        {
            "gain": drawn(HIDDEN) + 1,
            "inner": drawn(HEADS) + 1,
            "qkv": drawn(QKV, HIDDEN),
            "qkv_bias": drawn(QKV),
            "o": drawn(HIDDEN, HEADS),
            "o_bias": drawn(HIDDEN),
        }
        for _ in range(LAYERS)
    ]
    stream = torch.randn(1, HIDDEN, device="cuda").bfloat16()
    ways = {"cuBLAS": by_cublas, "few_row": by_few_row}
    plain, fused = (way(stream, layers).float() for way in ways.values())
    apart = float((plain - fused).norm() / plain.norm())
    graphs = {name: captured(partial(way, stream), [layers]) for name, way in ways.items()}
    us = in_turns(graphs, LAYERS)
    told = ", ".join(f"{name} {one:.1f}" for name, one in us.items())
    print(f"{torch.cuda.get_device_name()}, us a layer: {told}; apart {apart:.4f}")
    assert apart < MOST_APART, "few_row computes something else"


if __name__ == "__main__":
    main()
