"""Few-row linear kernels on a GPU: microseconds a call inside a CUDA graph of dependent calls.

    python benchmarks/kernels/few_row.py

Each call of a chain reads another copy of the weights, so that they come from memory rather than
from the cache. "fused" is what `auto` takes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.kernels.linear import few_row
from specengine.kernels.linear.activation import silu_and_mul
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm

EPS = 1e-5
COPIES = 60


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str  # norm, gated, add
    outs: int
    hidden: int


SHAPES = {
    "135M": [
        Shape("qkv", "norm", 960, 576),
        Shape("o", "add", 576, 576),
        Shape("gate_up", "gated", 3072, 576),
        Shape("down", "add", 576, 1536),
    ],
    "360M": [
        Shape("qkv", "norm", 1600, 960),
        Shape("o", "add", 960, 960),
        Shape("gate_up", "gated", 5120, 960),
        Shape("down", "add", 960, 2560),
    ],
    "1B": [
        Shape("qkv", "norm", 3072, 2048),
        Shape("o", "add", 2048, 2048),
        Shape("gate_up", "gated", 16384, 2048),
        Shape("down", "add", 2048, 8192),
    ],
    "8B": [
        Shape("qkv", "norm", 6144, 4096),
        Shape("o", "add", 4096, 4096),
        Shape("gate_up", "gated", 28672, 4096),
        Shape("down", "add", 4096, 14336),
    ],
}


def chain_us(call: Callable[[int], Any], count: int) -> float:
    """Microseconds a call, median of replays of one graph of `count` calls."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return sorted(times)[len(times) // 2]


@dataclass
class Case:
    shape: Shape
    rows: int
    weights: list[Tensor]
    gain: Tensor
    x: Tensor
    residual: Tensor

    def fused(self, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        if self.shape.kind == "norm":
            return few_row.norm_linear(self.x, self.gain, EPS, weight)
        if self.shape.kind == "gated":
            return few_row.norm_gated_linear(self.x, self.gain, EPS, weight)
        return few_row.linear_add(self.x, weight, self.residual)

    def unfused(self, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        if self.shape.kind == "norm":
            return F.linear(rms_norm(self.x, self.gain, EPS), weight)
        if self.shape.kind == "gated":
            normed, _ = fused_add_rms_norm(self.x, self.x, self.gain, EPS)
            return silu_and_mul(F.linear(normed, weight))
        return F.linear(self.x, weight)


def make(shape: Shape, rows: int, copies: int) -> Case:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    weights = [draw(shape.outs, shape.hidden) * shape.hidden**-0.5 for _ in range(copies)]
    return Case(
        shape, rows, weights, draw(shape.hidden), draw(rows, shape.hidden), draw(rows, shape.outs)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["135M", "360M", "1B"], choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    args = parser.parse_args()
    rows = []
    for model in args.models:
        copies = {"135M": COPIES, "360M": 30}.get(model, 6)
        for shape, count in itertools.product(SHAPES[model], args.rows):
            case = make(shape, count, copies)
            fused, plain = chain_us(case.fused, copies), chain_us(case.unfused, copies)
            bytes_moved = shape.outs * shape.hidden * 2
            row: dict[str, Any] = {
                "model": model,
                "shape": shape.name,
                "rows": count,
                "fused us": fused,
                "unfused us": plain,
                "fused TB/s": bytes_moved / fused / 1e6,
            }
            rows.append(row)
            print(row, flush=True)
    print(report.write("kernels", "few-row-linear", "Few-row linear kernels", rows))


if __name__ == "__main__":
    main()
