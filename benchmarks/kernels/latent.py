"""Latent attention in Triton: errors against float64, and microseconds by rows, context and blocks.

    python benchmarks/kernels/latent.py [--json FILE] [--no-sweep]

One layer at a time in a CUDA graph: the absorbed kernel with its merge, the store of latents, and
of long prompts the expanded form by each of PyTorch's fused attentions, beside the absorbed one.
"limit" is the time to read the latents once at the speed that this card copies at. The errors are
checked first: nothing is timed where one is too large.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from specengine.kernels.attention import latent_attention_triton as kernel
from specengine.kernels.attention.latent_attention import latent_attention
from specengine.kernels.attention.latent_store import latent_store
from specengine.kernels.attention.types import PagedBatch

CUDA = torch.device("cuda")
RANK, ROPE = 512, 64
SCALE = 192**-0.5
HEADS = {"deepseek-v2-lite": 16, "deepseek-v3": 128}
REPLAYS = 200
BLOCKS = [
    kernel.Blocks(rows, keys, warps, stages)
    for rows in (16, 32, 64)
    for keys in (16, 32, 64, 128)
    for warps in (4, 8)
    for stages in (1, 2, 3)
]
SWEPT = ((1, 1, 4000), (1, 4, 4000), (64, 1, 4000), (64, 4, 500))
PROMPTS = ((1, 512), (1, 2048), (4, 2048), (1, 8000))


@dataclass
class Case:
    q: Tensor
    cache: Tensor
    batch: PagedBatch

    @property
    def num_bytes(self) -> int:
        return int(self.batch.seq_lens.sum()) * (RANK + ROPE) * self.cache.itemsize


def case(
    heads: int, requests: int, queries: int, context: int, nodes: int = 0, fp8: bool = False
) -> Case:
    """nodes: of a tree, a star under the root, in place of a chain; that many queries."""
    queries = nodes or queries
    total = context + queries
    slots = torch.randperm(requests * total, device=CUDA) + 1
    table = torch.zeros(requests + 1, total, dtype=torch.int32, device=CUDA)
    table[1:] = slots.view(requests, total)
    mask = None
    if nodes:
        mask = torch.eye(nodes, dtype=torch.bool, device=CUDA).repeat(requests, 1, 1)
        mask[:, :, 0] = True
    batch = PagedBatch(
        req_to_token=table,
        req_pool_indices=torch.arange(1, requests + 1, device=CUDA),
        seq_lens=torch.full((requests,), total, device=CUDA),
        qo_indptr=torch.tensor([0, *accumulate([queries] * requests)], device=CUDA),
        positions=torch.arange(context, total, device=CUDA).repeat(requests),
        max_queries=queries,
        max_keys=total,
        tree_mask=mask,
    )
    cache = torch.randn(requests * total + 1, 1, RANK + ROPE, device=CUDA).bfloat16()
    q = torch.randn(requests * queries, heads, RANK + ROPE, device=CUDA).bfloat16()
    return Case(q, cache.to(torch.float8_e4m3fn) if fp8 else cache, batch)


def run(given: Case, splits: int | None = None) -> Tensor:
    return latent_attention(
        given.q, given.cache, RANK, given.batch, SCALE, num_splits=splits, backend="triton"
    )


def error(given: Case, splits: int | None) -> float:
    wide = replace(given, q=given.q.double(), cache=given.cache.double())
    expected = latent_attention(wide.q, wide.cache, RANK, wide.batch, SCALE, backend="torch")
    return float((run(given, splits).double() - expected).abs().max())


def check() -> None:
    for heads in HEADS.values():
        for given in (
            case(heads, 3, 1, 700),
            case(heads, 2, 5, 130),
            case(heads, 2, 1, 260, nodes=9),
            case(heads, 2, 1, 300, fp8=True),
        ):
            for splits in (None, 1, 7):
                found = error(given, splits)
                assert found < 0.02, f"{heads} heads, {splits} splits: wrong by {found}"
    print("errors are below 0.02")


def microseconds(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS // 10):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPLAYS


def copy_speed() -> float:
    """Bytes a second, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    y = torch.empty_like(x)
    return 2 * x.numel() / microseconds(lambda: y.copy_(x)) * 1e6


def decode_rows(speed: float) -> list[dict[str, Any]]:
    rows = []
    for name, heads in HEADS.items():
        for requests in (1, 8, 64):
            for queries in (1, 4):
                for context in (500, 4000, 16000):
                    if requests * context > 600_000:
                        continue
                    given = case(heads, requests, queries, context)
                    took = microseconds(lambda given=given: run(given))
                    limit = given.num_bytes / speed * 1e6
                    row = {"model": name, "requests": requests, "queries": queries}
                    row |= {"context": context, "us": round(took, 2), "limit": round(limit, 2)}
                    rows.append(row)
                    print(row, flush=True)
    return rows


def sweep() -> list[dict[str, Any]]:
    """Which blocks and splits are fastest; what does not compile or fit is left out."""
    rows, chosen = [], kernel._blocks
    try:
        for heads in HEADS.values():
            for requests, queries, context in (
                (1, 1, 4000),
                (1, 4, 4000),
                (64, 1, 4000),
                (64, 4, 500),
            ):
                given, found = case(heads, requests, queries, context), []
                for blocks in BLOCKS:
                    kernel._blocks = lambda *_, blocks=blocks: blocks
                    for splits in (None, 8, 32, 64) if requests == 1 else (None,):
                        try:
                            took = microseconds(lambda: run(given, splits))  # noqa: B023
                        except Exception as failure:
                            print("left out", blocks, type(failure).__name__, flush=True)
                            break
                        found.append((round(took, 2), str(blocks), splits))
                best = sorted(found, key=lambda one: one[0])[:4]
                row = {"heads": heads, "requests": requests, "queries": queries}
                row |= {"context": context, "best": best}
                rows.append(row)
                print(row, flush=True)
    finally:
        kernel._blocks = chosen
    return rows


def expanded(q: Tensor, latent: Tensor, up: Tensor) -> Tensor:
    """[B, H, T, 192], [B * T, RANK], [H * 256, RANK]; the rotated part of keys is of q."""
    both = F.linear(latent, up).view(len(q), q.shape[2], q.shape[1], 256).transpose(1, 2)
    k = torch.cat((both[..., :128], q[..., :64]), -1)
    return F.scaled_dot_product_attention(q, k, both[..., 128:], is_causal=True, scale=SCALE)


def prompt_rows() -> list[dict[str, Any]]:
    """Attention of a layer over prompts without a prefix, the expansion's product included."""
    rows = []
    for name, heads in HEADS.items():
        up = torch.randn(heads * 256, RANK, device=CUDA).bfloat16() * 0.05
        for requests, length in PROMPTS:
            row: dict[str, Any] = {"model": name, "requests": requests, "length": length}
            given = case(heads, requests, length, 0)
            row["absorbed"] = round(microseconds(lambda given=given: run(given)), 1)
            for backend in (
                SDPBackend.FLASH_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.CUDNN_ATTENTION,
            ):
                q = torch.randn(requests, heads, length, 192, device=CUDA).bfloat16()
                latent = torch.randn(requests * length, RANK, device=CUDA).bfloat16()

                call = partial(expanded, q, latent, up)
                try:
                    with sdpa_kernel(backend):
                        row[backend.name] = round(microseconds(call), 1)
                except Exception as failure:
                    row[backend.name] = type(failure).__name__
            rows.append(row)
            print(row, flush=True)
    return rows


def store_rows() -> list[dict[str, Any]]:
    rows = []
    weight = torch.ones(RANK, device=CUDA).bfloat16()
    angles = torch.rand(4096, ROPE, device=CUDA)
    for name, heads in HEADS.items():
        for tokens in (1, 4, 64, 256, 2048):
            q = torch.randn(tokens, heads, 192, device=CUDA).bfloat16()[..., 128:]
            out = torch.empty(tokens, heads, RANK + ROPE, device=CUDA).bfloat16()[..., RANK:]
            compressed = torch.randn(tokens, RANK + ROPE, device=CUDA).bfloat16()
            cache = torch.zeros(tokens + 1, 1, RANK + ROPE, device=CUDA).bfloat16()
            places = torch.arange(tokens, device=CUDA)
            given = q, compressed, weight, 1e-6, places, angles, True, out, cache, places + 1
            took = microseconds(lambda given=given: latent_store(*given))
            rows.append({"model": name, "tokens": tokens, "us": round(took, 2)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    made: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    made["store"] = store_rows()
    made["rounds"] = decode_rows(copy_speed())
    made["prompts"] = prompt_rows()
    if not options.no_sweep:
        made["sweep"] = sweep()
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
