"""Paged attention on a GPU: microseconds a call inside a CUDA graph of dependent calls.

    python benchmarks/kernels/attention.py [--sweep]

Each call of a chain reads another layer's KV at scattered slots. Plans are those of a captured
graph (shaped for the whole context), but for extend. `--sweep` also tries shapes of a program and
least keys of a share, and prints the best.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.kernels.attention import paged_attention_triton
from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.paged_attention_triton import Blocks
from specengine.kernels.attention.types import PagedBatch

LAYERS = 8
CONTEXT = 8192
HEADS = {"135M": (9, 3, 64), "8B": (32, 8, 128)}  # query heads, KV heads, head dim


@dataclass(frozen=True)
class Shape:
    name: str
    requests: int
    queries: int
    keys: int  # of each request, the new ones included
    is_tree: bool = False


SHAPES = [
    *(Shape("decode", b, 1, keys) for b, keys in [(1, 100), (1, 280), (1, 1024), (1, 8000)]),
    *(Shape("decode", b, 1, keys) for b, keys in [(8, 280), (64, 280), (64, 2048)]),
    *(Shape("chain", b, 4, keys) for b, keys in [(1, 280), (64, 280), (1, 8000)]),
    *(Shape("tree", b, 16, keys, True) for b, keys in [(1, 280), (8, 2048)]),
    Shape("tree", 1, 64, 2048, True),
    *(Shape("extend", b, queries, 2048) for b, queries in [(1, 2048), (4, 512)]),
]


@dataclass
class Case:
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    batch: PagedBatch
    bytes_read: int

    def run(self, call: int) -> Tensor:
        k_cache, v_cache = self.caches[call % LAYERS]
        return paged_attention(self.q, k_cache, v_cache, self.batch, 0.1, backend="triton")


def make(shape: Shape, heads: tuple[int, int, int]) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    slots = shape.requests * shape.keys + 1
    device = torch.device("cuda")
    table = torch.zeros(shape.requests, CONTEXT, dtype=torch.int32, device=device)
    scattered = torch.randperm(slots - 1, device=device).int() + 1
    table[:, : shape.keys] = scattered.view(shape.requests, shape.keys)
    mask = torch.ones(shape.requests, shape.queries, shape.queries, dtype=torch.bool, device=device)
    tokens = shape.requests * shape.queries
    kv = torch.randn(LAYERS, 2, slots, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    batch = PagedBatch(
        req_to_token=table,
        req_pool_indices=torch.arange(shape.requests, device=device),
        seq_lens=torch.full((shape.requests,), shape.keys, device=device),
        qo_indptr=torch.arange(0, tokens + 1, shape.queries, device=device),
        positions=torch.zeros(tokens, dtype=torch.int64, device=device),
        max_queries=shape.queries,
        max_keys=shape.keys if shape.name == "extend" else CONTEXT,
        tree_mask=mask.tril() if shape.is_tree else None,
        counters=torch.zeros(4096, dtype=torch.int32, device=device),
    )
    q = torch.randn(tokens, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    return Case(q, [(layer[0], layer[1]) for layer in kv], batch, kv[0].numel() * 2)


def chain_us(call: Callable[[int], Any], count: int = 4 * LAYERS) -> float:
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


def best_blocks(case: Case, heads: tuple[int, int, int]) -> dict[str, Any]:
    """The fastest shape of a program and least share, and its time."""
    kernel: Any = paged_attention_triton
    keep = kernel._blocks, kernel._MIN_SHARE
    queries = case.batch.max_queries
    rows = keep[0](case.q.dtype, heads[2], heads[0] // heads[1], queries, False).rows
    times: list[tuple[float, str]] = []
    for keys, warps, stages, share in itertools.product(
        (64, 128), (2, 4, 8), (2, 3), (128, 256, 512)
    ):
        blocks = Blocks(rows, keys, warps, stages)
        kernel._blocks, kernel._MIN_SHARE = (lambda *_, blocks=blocks: blocks), share
        try:
            times.append((chain_us(case.run), f"{blocks} share {share}"))
        except Exception as error:
            print(f"  {blocks}: {type(error).__name__}", flush=True)
    kernel._blocks, kernel._MIN_SHARE = keep
    best, name = min(times)
    return {"best us": best, "best": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rows = []
    for model, shape in itertools.product(args.models, SHAPES):
        case = make(shape, HEADS[model])
        took = chain_us(case.run)
        row: dict[str, Any] = {"model": model, **vars(shape), "us": took}
        row["TB/s"] = case.bytes_read / took / 1e6
        if args.sweep and shape.name != "extend":
            row |= best_blocks(case, HEADS[model])
        rows.append(row)
        print(row, flush=True)
    print(report.write("attention", "paged-attention", "Paged attention", rows))


if __name__ == "__main__":
    main()
