"""Attention of few requests between W4A16 products of an 8B: Triton's kernel and that of CUDA C++.

    python benchmarks/kernels/few_requests_attention.py --out DIR

Microseconds that attention adds to a chain of dependent products inside one graph, first and second
projection by turns, every layer with weights and KV of its own. Results of both are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from layer_tail import HIDDEN, LAYERS
from quantised import draw, four_bits
from wide_rows import CONTEXT, DIM, HEADS, KV_HEADS, SLOTS, round_batch

from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.precompile import precompile

TIMES, REPLAYS = 2, 25
KERNELS: tuple[Backend, ...] = ("triton", "cuda")
TITLE = "Attention of few requests between W4A16 products of an 8B"
NOTES = """What attention adds to a chain of two products a layer. "near": the greatest difference
between the outputs of the two kernels, by the greatest output."""


@dataclass(frozen=True)
class Layer:
    qkv: IntWeight
    out: IntWeight
    k_cache: Tensor
    v_cache: Tensor

    @classmethod
    def draw(cls) -> Layer:
        qkv = draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, HIDDEN**-0.5)
        out = draw(HIDDEN, HEADS * DIM, HIDDEN**-0.5)
        k, v = (draw(SLOTS * KV_HEADS, DIM).view(SLOTS, KV_HEADS, DIM) for _ in range(2))
        return cls(four_bits(qkv, True), four_bits(out, True), k, v)


@dataclass(frozen=True)
class Rows:
    """A round of requests with as many queries each, behind as many keys."""

    batch: PagedBatch
    loc: Tensor
    angles: Tensor

    @classmethod
    def of(cls, requests: int, queries: int, keys: int) -> Rows:
        batch, slots = round_batch(requests, queries, keys)
        turns = torch.arange(CONTEXT, device="cuda")[:, None] * torch.rand(DIM // 2, device="cuda")
        return cls(batch, slots, torch.cat([turns.cos(), turns.sin()], 1))


def attention(qkv: Tensor, layer: Layer, rows: Rows, backend: Backend) -> Tensor:
    sizes = [HEADS, KV_HEADS, KV_HEADS]
    q, k, v = qkv.view(len(qkv), -1, DIM).split(sizes, 1)
    caches = layer.k_cache, layer.v_cache
    given = q, k, v, rows.angles, *caches, rows.loc, rows.batch
    return rope_attention(*given, DIM**-0.5, backend=backend)


def chain(layers: list[Layer], rows: Rows, kernel: Backend | None, times: int = TIMES) -> None:
    """kernel: of attention; None: without it."""
    x = torch.ones(len(rows.loc), HIDDEN, device="cuda", dtype=torch.bfloat16)
    heads = torch.ones_like(x)
    for layer in layers * times:
        qkv = int_linear(x, layer.qkv)
        if kernel is not None:
            heads = attention(qkv, layer, rows, kernel).view(x.shape)
        x = int_linear(heads, layer.out)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def in_turns(graphs: dict[Backend | None, torch.cuda.CUDAGraph]) -> dict[Backend | None, float]:
    """Microseconds a layer, the median of replays."""
    times: dict[Backend | None, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / LAYERS / TIMES)
    return {name: statistics.median(found) for name, found in times.items()}


def difference(layer: Layer, rows: Rows) -> float:
    """Of Triton's output and ours, by the greatest one; of what they write, none is allowed but for
    a rounding."""
    qkv = draw(len(rows.loc), (HEADS + 2 * KV_HEADS) * DIM)
    found = []
    for backend in KERNELS:
        own = replace(layer, k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone())
        out = attention(qkv, own, rows, backend)
        found.append((out.float(), own.k_cache.float(), own.v_cache.float()))
    (a, a_k, a_v), (b, b_k, b_v) = found
    torch.testing.assert_close(a_k, b_k, rtol=0.01, atol=0.01)
    assert torch.equal(a_v, b_v)
    assert not b.isnan().any()
    return float((a - b).abs().max() / a.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2])
    keys = [60, 160, 290, 700, 1150, 4000, 8000]
    parser.add_argument("--keys", type=int, nargs="+", default=keys)
    args = parser.parse_args()
    if args.out is not None:
        os.environ[report.ELSEWHERE] = str(args.out.resolve())
    torch.manual_seed(0)
    layers = [Layer.draw() for _ in range(LAYERS)]
    cases = list(product(args.requests, args.queries, args.keys))
    with precompile():
        for requests, queries, keys in cases:
            rows = Rows.of(requests, queries, keys)
            for kernel in KERNELS:
                chain(layers[:1], rows, kernel, 1)
    found: list[dict[str, Any]] = []
    for requests, queries, keys in cases:
        rows = Rows.of(requests, queries, keys)
        near = difference(layers[0], rows)
        graphs = {one: captured(partial(chain, layers, rows, one)) for one in (None, *KERNELS)}
        us = in_turns(graphs)
        found.append({"requests": requests, "queries": queries, "keys": keys, "near": near})
        found[-1] |= {f"{one} us": us[one] - us[None] for one in KERNELS}
        told = "  ".join(f"{one} {us[one] - us[None]:5.2f}" for one in KERNELS)
        what = f"{requests} x {queries} queries, {keys:>4} keys"
        print(f"{what}: {told}  products {us[None]:.2f}  near {near:.4f}", flush=True)
        if near > 0.02:
            raise SystemExit(f"{what}: the kernels differ by {near:.3f}")
    print(report.write("kernels", "few-requests-attention", TITLE, found, NOTES))


if __name__ == "__main__":
    main()
