"""Attention of few requests between layers of an 8B: Triton's kernel and that of CUDA C++.

    python benchmarks/kernels/few_requests_attention.py --out DIR

Microseconds that attention adds to a chain inside one graph, of layers without it in bfloat16 and
of W4A16 products, first and second projection by turns; every layer has weights and KV of its own.
Results of both are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from layer_tail import HIDDEN, LAYERS
from layer_tail import Layer as Tail
from quantised import draw, four_bits
from wide_rows import CONTEXT, DIM, HEADS, KV_HEADS, SLOTS, round_batch

from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.linear.types import MOST_TAIL_ROWS
from specengine.kernels.precompile import precompile

TIMES, REPLAYS = 2, 25
FIRST_SLOT = 16  # of wide_rows.py's batches
KERNELS: tuple[Backend, ...] = ("triton", "cuda")
NAMES: dict[Backend, str] = {"triton": "Triton", "cuda": "CUDA C++"}
TITLE = "Attention of few requests between layers of an 8B"
NOTES = """What attention adds to a chain of layers without it (bfloat16), or of two W4A16 products
a layer (int4)."""
Cache = tuple[Tensor, Tensor]


class Layer(Protocol):
    def behind(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """First projection of the next layer, and the residual stream."""
        ...


@dataclass(frozen=True)
class Int4Layer:
    out: IntWeight
    qkv: IntWeight

    @classmethod
    def draw(cls) -> Int4Layer:
        out = draw(HIDDEN, HEADS * DIM, HIDDEN**-0.5)
        qkv = draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, HIDDEN**-0.5)
        return cls(four_bits(out, True), four_bits(qkv, True))

    def behind(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return int_linear(int_linear(heads, self.out), self.qkv), stream


@dataclass(frozen=True)
class WholeLayer:
    tail: Tail

    @classmethod
    def draw(cls) -> WholeLayer:
        return cls(Tail.draw())

    def behind(self, heads: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        form = self.tail.fused if len(heads) <= MOST_TAIL_ROWS else self.tail.parts
        return form(heads, stream)


KINDS: dict[str, Callable[[], Layer]] = {"bfloat16": WholeLayer.draw, "int4": Int4Layer.draw}


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


def attention(qkv: Tensor, cache: Cache, rows: Rows, backend: Backend) -> Tensor:
    sizes = [HEADS, KV_HEADS, KV_HEADS]
    q, k, v = qkv.view(len(qkv), -1, DIM).split(sizes, 1)
    given = q, k, v, rows.angles, *cache, rows.loc, rows.batch
    return rope_attention(*given, DIM**-0.5, backend=backend)


def chain(
    layers: list[Layer], caches: list[Cache], rows: Rows, kernel: Backend | None, times: int = TIMES
) -> None:
    """kernel: of attention; None: without it."""
    stream = torch.ones(len(rows.loc), HIDDEN, device="cuda", dtype=torch.bfloat16)
    heads = torch.ones_like(stream)
    for layer, cache in list(zip(layers, caches, strict=True)) * times:
        qkv, stream = layer.behind(heads, stream)
        if kernel is not None:
            heads = attention(qkv, cache, rows, kernel).view(stream.shape)


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


def difference(cache: Cache, rows: Rows) -> float:
    """Of Triton's output and ours, by the greatest one; of what they write, none is allowed but for
    a rounding."""
    qkv = draw(len(rows.loc), (HEADS + 2 * KV_HEADS) * DIM)
    found = []
    for backend in KERNELS:
        k, v = (one.clone() for one in cache)
        out = attention(qkv, (k, v), rows, backend)
        found.append((out.float(), k.float(), v.float()))
    (a, a_k, a_v), (b, b_k, b_v) = found
    torch.testing.assert_close(a_k, b_k, rtol=0.01, atol=0.01)
    assert torch.equal(a_v, b_v)
    assert not b.isnan().any()
    return float((a - b).abs().max() / a.abs().max())


def drawn_cache() -> Cache:
    k, v = (draw(SLOTS * KV_HEADS, DIM).view(SLOTS, KV_HEADS, DIM) for _ in range(2))
    return k, v


def measured(
    kind: str, caches: list[Cache], cases: list[tuple[int, int]], keys: list[int]
) -> Iterator[dict[str, Any]]:
    """Of each number of requests and of queries."""
    layers = [KINDS[kind]() for _ in caches]
    # Requests that shared slots would write over each other's keys.
    fitting = {
        case: [some for some in keys if case[0] * (case[1] + some) <= SLOTS - FIRST_SLOT]
        for case in cases
    }
    with precompile():
        for case, of_case in fitting.items():
            for some, kernel in product(of_case, KERNELS):
                chain(layers[:1], caches[:1], Rows.of(*case, some), kernel, 1)
    for (requests, queries), of_case in fitting.items():
        columns = [f"{some:,} keys, {NAMES[one]} us" for some in keys for one in KERNELS]
        row: dict[str, Any] = {"weights": kind, "requests": requests, "queries": queries}
        for some in of_case:
            rows = Rows.of(requests, queries, some)
            near = difference(caches[0], rows)
            runs = {one: partial(chain, layers, caches, rows, one) for one in (None, *KERNELS)}
            us = in_turns({one: captured(run) for one, run in runs.items()})
            told = "  ".join(f"{one} {us[one] - us[None]:5.2f}" for one in KERNELS)
            what = f"{kind}, {requests} x {queries} queries, {some:>4} keys"
            print(f"{what}: {told}  layer {us[None]:.2f}  near {near:.4f}", flush=True)
            if near > 0.02:
                raise SystemExit(f"{what}: the kernels differ by {near:.3f}")
            row |= {f"{some:,} keys, {NAMES[one]} us": us[one] - us[None] for one in KERNELS}
        yield row | {one: None for one in columns if one not in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--weights", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--keys", type=int, nargs="+", default=[160, 1150, 4000, 8000])
    args = parser.parse_args()
    if args.out is not None:
        os.environ[report.ELSEWHERE] = str(args.out.resolve())
    torch.manual_seed(0)
    caches = [drawn_cache() for _ in range(LAYERS)]
    cases = list(product(args.requests, args.queries))
    found = [row for kind in args.weights for row in measured(kind, caches, cases, args.keys)]
    print(report.write("kernels", "few-requests-attention", TITLE, found, NOTES))


if __name__ == "__main__":
    main()
