"""A wide model's products for few rows: cuBLAS, Triton and the stream of few_row_wide.cu.

    python benchmarks/kernels/few_row_wide.py

First whole layers of an 8B model in a chain, without attention (microseconds a layer), then single
products. Every product of a chain reads weights of its own, so that they come from memory. "wide
64" has stages of half the depth, twice as many.
"""

from __future__ import annotations

import argparse
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

from specengine.kernels import few_row, few_row_wide
from specengine.kernels.activation import silu_and_mul
from specengine.kernels.dispatch import Backend
from specengine.kernels.few_row_wide import Ring
from specengine.kernels.norm import fused_add_rms_norm, rms_norm

HIDDEN, QKV, INTERMEDIATE, LAYERS = 4096, 6144, 14336, 4
SINGLE = {
    "EAGLE-3 fc": (4096, 12288),
    "EAGLE-3 qkv": (6144, 8192),
    "EAGLE-3 head": (32000, 4096),
    "head": (128256, 4096),
}


def draw(*size: int) -> Tensor:
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=size[-1] ** -0.5)


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    gain: Tensor

    @classmethod
    def draw(cls) -> Layer:
        gate_up = draw(2 * INTERMEDIATE, HIDDEN)
        gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        parts = draw(QKV, HIDDEN), draw(HIDDEN, HIDDEN), gate_up, draw(HIDDEN, INTERMEDIATE)
        return cls(*parts, gain)

    def fused(self, x: Tensor, backend: Backend) -> Tensor:
        qkv = few_row.norm_linear(x, self.gain, EPS, self.qkv, backend=backend)
        x = few_row.linear_add(qkv[:, :HIDDEN], self.out, x, backend=backend)
        gated = few_row.norm_gated_linear(x, self.gain, EPS, self.gate_up, backend=backend)
        return few_row.linear_add(gated, self.down, x, backend=backend)

    def unfused(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = fused_add_rms_norm(x, residual, self.gain, EPS)
        x = F.linear(F.linear(x, self.qkv)[:, :HIDDEN], self.out)
        x, residual = fused_add_rms_norm(x, residual, self.gain, EPS)
        return F.linear(silu_and_mul(F.linear(x, self.gate_up)), self.down), residual


def layers_us(layers: list[Layer], rows: int) -> dict[str, float]:
    first = torch.randn((rows, HIDDEN), device="cuda").bfloat16()

    def unfused(_: int) -> None:
        x, residual = first, first
        for layer in layers:
            x, residual = layer.unfused(x, residual)

    def fused(backend: Backend) -> Callable[[int], None]:
        def run(_: int) -> None:
            x = first
            for layer in layers:
                x = layer.fused(x, backend)

        return run

    calls = {"cuBLAS us": unfused, "wide us": fused("wide")}
    if rows == 1:
        calls["Triton us"] = fused("triton")
    found = {name: chain_us(call, 1) / len(layers) for name, call in calls.items()}
    with_half_stages = with_ring(rows, lambda: chain_us(fused("wide"), 1) / len(layers))
    return {**found, "wide 64 us": with_half_stages}


def with_ring(rows: int, measure: Callable[[], float]) -> float:
    """measure() with stages half as deep, twice as many."""
    usual = few_row_wide.ring_for
    ring = usual(rows)
    few_row_wide.ring_for = lambda rows: Ring(2 * ring.stages, ring.step // 2)
    try:
        return measure()
    finally:
        few_row_wide.ring_for = usual


def single_us(weights: list[Tensor], gain: Tensor | None, rows: int) -> dict[str, float]:
    x = torch.randn((rows, weights[0].shape[1]), device="cuda").bfloat16()

    def cublas(i: int) -> Tensor:
        normed = x if gain is None else rms_norm(x, gain, EPS)
        return F.linear(normed, weights[i % len(weights)])

    def wide(i: int) -> Tensor:
        weight = weights[i % len(weights)]
        if gain is None:
            return few_row.linear(x, weight, backend="wide")
        return few_row.norm_linear(x, gain, EPS, weight, backend="wide")

    count = 2 * len(weights)
    found = {"cuBLAS us": chain_us(cublas, count), "wide us": chain_us(wide, count)}
    return {**found, "wide 64 us": with_ring(rows, lambda: chain_us(wide, count))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    layers = [Layer.draw() for _ in range(LAYERS)]
    chains: dict[str, tuple[list[Tensor], Tensor | None]] = {
        "norm + qkv": ([layer.qkv for layer in layers], layers[0].gain),
        "out": ([layer.out for layer in layers], None),
        "norm + gate_up": ([layer.gate_up for layer in layers], layers[0].gain),
        "down": ([layer.down for layer in layers], None),
    }
    chains |= {name: ([draw(*size) for _ in range(3)], None) for name, size in SINGLE.items()}
    found: list[dict[str, Any]] = []

    def add(name: str, rows: int, size: int, times: dict[str, float]) -> None:
        bandwidth = 2 * size / times["wide us"] / 1e6
        columns = ("cuBLAS us", "Triton us", "wide us", "wide 64 us")
        row = {"what": name, "rows": rows, **{key: times.get(key) for key in columns}}
        found.append({**row, "wide TB/s": bandwidth})
        print(found[-1], flush=True)

    numbers = sum(w.numel() for w in (layers[0].qkv, layers[0].out, layers[0].gate_up))
    for rows in args.rows:
        add("layer", rows, numbers + layers[0].down.numel(), layers_us(layers, rows))
    for name, (weights, gain) in chains.items():
        for rows in args.rows:
            add(name, rows, weights[0].numel(), single_us(weights, gain, rows))
    print(report.write("few-row-wide", "Few-row products of wide models", found))


if __name__ == "__main__":
    main()
