"""Attention of a layer by backend: rotation, KV write and attention, on a GPU.

    python benchmarks/kernels/attention_backends.py [--backends triton fa flashinfer]

`us`: microseconds a layer inside a CUDA graph of dependent layers, each over KV of its own at
scattered slots. `plan us`: what the host spends on one eager plan, metadata of the batch not
counted. Plans of graphs are shaped for a context of 8,192; those of FlashInfer for what is there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.batch import AttentionBackend, ForwardBatch, ForwardMode
from specengine.core.errors import ConfigError
from specengine.core.tree import Tree
from specengine.layers.attention import Attention
from specengine.layers.rotary import RotaryEmbedding
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.runner.attention import make_attention_backend

LAYERS = 4
CONTEXT = 8192
HEADS = {"135M": (9, 3, 64), "8B": (32, 8, 128)}  # query heads, KV heads, head dim
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Work:
    mode: str
    requests: int
    queries: int
    keys: int  # of each request, the new ones included


WORK = [
    *(Work("decode", b, 1, keys) for b, keys in itertools.product((1, 8, 64), (256, 2048, 8000))),
    *(Work("chain", b, 4, keys) for b, keys in itertools.product((1, 8, 64), (256, 2048))),
    *(Work("tree", b, 16, keys) for b, keys in itertools.product((1, 8, 64), (256, 2048))),
    *(Work("extend", b, n, keys) for b, n, keys in ((8, 32, 32), (1, 512, 512), (1, 512, 8000))),
    *(Work("extend", b, n, keys) for b, n, keys in ((4, 2048, 2048), (1, 8000, 8000))),
]
MODES = {"decode": ForwardMode.DECODE, "extend": ForwardMode.EXTEND}


@dataclass
class PageTable:
    req_to_token: Tensor


class Stack:
    """A few attention layers, and the KV that they share a table of."""

    def __init__(self, heads: tuple[int, int, int], slots: int) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.heads = heads
        rotary = RotaryEmbedding(head_dim, CONTEXT, {"rope_theta": 1e4, "rope_type": "default"})
        shape = num_heads, head_dim, head_dim**-0.5, num_kv_heads
        self.layers = tuple(Attention(*shape, i, rotary.to(CUDA)) for i in range(LAYERS))
        self.kv = MHATokenToKVPool(
            slots, KVShape(LAYERS, num_kv_heads, head_dim, torch.bfloat16), CUDA
        )
        for layer in range(LAYERS):
            for cache in self.kv.get_kv_buffer(layer):
                cache.normal_()

    def run(self, batch: ForwardBatch, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        for layer in self.layers:
            out: Tensor = layer(batch.positions, *qkv, batch)
        return out


def make_batch(stack: Stack, work: Work, backend: AttentionBackend) -> ForwardBatch:
    B, n, keys = work.requests, work.queries, work.keys
    torch.manual_seed(0)  # the same slots for every backend
    table = torch.zeros(B + 1, CONTEXT, dtype=torch.int32, device=CUDA)
    table[1:, :keys] = torch.randperm(B * keys, device=CUDA).int().view(B, keys) + 1
    ints = {"dtype": torch.int64, "device": CUDA}
    place_BN = torch.arange(keys - n, keys, device=CUDA).expand(B, n)
    tree = None
    if work.mode == "tree":
        depths = torch.arange(n, device=CUDA).expand(B, n).reshape(-1)
        mask = torch.ones(B, n, n, dtype=torch.bool, device=CUDA).tril()
        tree = Tree(depths, mask.contiguous())
    return ForwardBatch(
        forward_mode=MODES.get(work.mode, ForwardMode.TARGET_VERIFY),
        batch_size=B,
        num_tokens=B * n,
        input_ids=torch.zeros(B * n, **ints),
        positions=place_BN.reshape(-1).contiguous(),
        out_cache_loc=table[1:].gather(1, place_BN).reshape(-1).long(),
        req_pool_indices=torch.arange(1, B + 1, device=CUDA),
        prefix_lens=torch.full((B,), keys - n, **ints),
        extend_lens=torch.full((B,), n, **ints),
        seq_lens=torch.full((B,), keys, **ints),
        qo_indptr=torch.arange(0, B * n + 1, n, device=CUDA),
        prefix_lens_cpu=[keys - n] * B,
        extend_lens_cpu=[n] * B,
        logits_rows=None,
        req_to_token_pool=PageTable(table),
        token_to_kv_pool=stack.kv,
        attn_backend=backend,
        tree=tree,
        attn_layers=stack.layers,
    )


def graph_us(run: Callable[[], Any], replays: int = 12) -> float:
    """Microseconds of one run, the median of replays of a graph of four."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 4)
    return sorted(times)[len(times) // 2]


def plan_us(backend: AttentionBackend, batch: ForwardBatch, count: int = 12) -> float:
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = perf_counter()
        backend.init_forward_metadata(batch)
        times.append((perf_counter() - start) * 1e6)
    return sorted(times)[count // 2]


def measure(stack: Stack, work: Work, backends: dict[str, AttentionBackend]) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = stack.heads
    tokens = work.requests * work.queries
    wide = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=CUDA)
    sizes = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = wide.bfloat16().split(sizes, dim=1)
    row: dict[str, Any] = dict(vars(work))
    outs: list[Tensor] = []
    for name, backend in backends.items():
        batch = make_batch(stack, work, backend)
        if work.mode == "extend" and tokens > 512:
            backend.init_forward_metadata(batch)  # never captured
        else:
            plan = backend.init_forward_metadata_capture(batch)
            backend.init_forward_metadata_replay(batch, plan)
        outs.append(stack.run(batch, (q, k, v)))
        row[f"{name} us"] = graph_us(lambda batch=batch: stack.run(batch, (q, k, v))) / LAYERS
        row[f"{name} plan us"] = plan_us(backend, make_batch(stack, work, backend))
    row["apart"] = max(float((out - outs[0]).abs().max()) for out in outs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["triton", "fa", "flashinfer"])
    parser.add_argument("--models", nargs="+", default=list(HEADS), choices=list(HEADS))
    args = parser.parse_args()
    backends: dict[str, AttentionBackend] = {}
    for name in args.backends:
        try:
            backends[name] = make_attention_backend(name, CUDA)
        except ConfigError as error:
            print(f"{name} is left out: {error}")
    rows = []
    with torch.inference_mode():
        for model in args.models:
            stack = Stack(HEADS[model], 64 * 8000 + 1)
            for work in WORK:
                rows.append({"model": model, **measure(stack, work, backends)})
                print(rows[-1], flush=True)
    print(report.write("attention", "attention-backends", "Attention by backend", rows))


if __name__ == "__main__":
    main()
