"""A wide model's layers for few rows: cuBLAS, Triton (one row), and one kernel after attention.

    python benchmarks/kernels/layer_tail.py

Layers of an 8B model in a chain, without attention, inside one graph; microseconds a layer. Every
layer has weights of its own, so that they come from memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from few_row import EPS, chain_us

from specengine.kernels.linear import few_row
from specengine.kernels.linear.activation import silu_and_mul
from specengine.kernels.linear.layer_tail import layer_tail
from specengine.kernels.linear.norm import fused_add_rms_norm, sum_add_rms_norm
from specengine.kernels.linear.split_linear import split_linear
from specengine.kernels.linear.types import MOST_TAIL_ROWS, Projection, TailWeights

HIDDEN, QKV, INTERMEDIATE, LAYERS = 4096, 6144, 14336, 8
BYTES = 2 * (HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)


def draw(*size: int) -> Tensor:
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=size[-1] ** -0.5)


@dataclass(frozen=True)
class Layer:
    weights: TailWeights
    following: Projection

    @classmethod
    def draw(cls) -> Layer:
        gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        gate_up, down = draw(2 * INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE)
        tail = TailWeights(draw(HIDDEN, HIDDEN), gain, gate_up, down)
        return cls(tail, Projection(gain, draw(QKV, HIDDEN), None))

    def one_row(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        tail, following = self.weights, self.following
        stream = few_row.linear_add(heads, tail.out, stream, backend="triton")
        gates = few_row.norm_gated_linear(stream, tail.gain, EPS, tail.gate_up, backend="triton")
        stream = few_row.linear_add(gates, tail.down, stream, backend="triton")
        gain, weight = following.gain, following.weight
        return few_row.norm_linear(stream, gain, EPS, weight, backend="triton"), stream

    def fused(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        tail = layer_tail(heads, stream, self.weights, EPS, self.following, backend="cuda")
        assert tail.qkv is not None
        return tail.qkv, tail.stream

    def parts(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        tail, following = self.weights, self.following
        x, stream = sum_add_rms_norm(split_linear(heads, tail.out), stream, tail.gain, EPS)
        sums = split_linear(silu_and_mul(F.linear(x, tail.gate_up)), tail.down)
        x, stream = sum_add_rms_norm(sums, stream, following.gain, EPS)
        return F.linear(x, following.weight), stream

    def unfused(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        tail, following = self.weights, self.following
        x, stream = fused_add_rms_norm(F.linear(heads, tail.out), stream, tail.gain, EPS)
        x = F.linear(silu_and_mul(F.linear(x, tail.gate_up)), tail.down)
        x, stream = fused_add_rms_norm(x, stream, following.gain, EPS)
        return F.linear(x, following.weight), stream


Step = Callable[[Layer, Tensor, Tensor], tuple[Tensor, Tensor]]


def layer_us(layers: list[Layer], rows: int, step: Step) -> float:
    first = torch.randn((rows, HIDDEN), device="cuda").bfloat16()

    def run(_: int) -> None:
        heads, stream = first, first
        for layer in layers:
            qkv, stream = step(layer, heads, stream)
            heads = qkv[:, :HIDDEN]

    return chain_us(run, 1) / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 9, 16, 24, 32, 64])
    parser.add_argument("--out", type=Path, help="folder for the table")
    args = parser.parse_args()
    if args.out is not None:
        os.environ[report.ELSEWHERE] = str(args.out.resolve())
    layers = [Layer.draw() for _ in range(LAYERS)]
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        row: dict[str, Any] = {
            "rows": rows,
            "cuBLAS, six kernels us": layer_us(layers, rows, Layer.unfused),
        }
        row["cuBLAS, products in parts us"] = layer_us(layers, rows, Layer.parts)
        row["Triton us"] = layer_us(layers, rows, Layer.one_row) if rows == 1 else None
        took = layer_us(layers, rows, Layer.fused) if rows <= MOST_TAIL_ROWS else None
        row |= {"one kernel us": took, "TB/s": BYTES / took / 1e6 if took else None}
        found.append(row)
        print(row, flush=True)
    print(
        report.write("kernels", "layer-tail", "A wide layer behind attention in one kernel", found)
    )


if __name__ == "__main__":
    main()
