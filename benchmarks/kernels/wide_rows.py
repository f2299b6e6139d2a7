"""8B layers at 9 to 256 rows: products in parts, and attention right behind a product of cuBLAS.

    python benchmarks/kernels/wide_rows.py

Microseconds inside one graph, every layer with weights and KV of its own. Layers are without
attention; attention is what it adds to a chain of first projections.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from few_row import EPS, chain_us
from layer_tail import HIDDEN, INTERMEDIATE, LAYERS, QKV, draw

from specengine.kernels.attention import rope_attention_triton
from specengine.kernels.attention.rope_attention_blocks import Blocks
from specengine.kernels.attention.rope_attention_triton import rope_attention
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.linear.activation import silu_and_mul
from specengine.kernels.linear.norm import fused_add_rms_norm, sum_add_rms_norm
from specengine.kernels.linear.split_linear import split_linear

HEADS, KV_HEADS, DIM = 32, 8, 128
SLOTS, CONTEXT = 65536, 8192
BEFORE = {True: Blocks(128, 8, 2, 128), False: Blocks(128, 4, 2, 128)}  # fewer than 32 groups


@dataclass(frozen=True)
class Layer:
    out: Tensor
    gate_up: Tensor
    down: Tensor
    qkv: Tensor

    @classmethod
    def draw(cls) -> Layer:
        gate_up, down = draw(2 * INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE)
        return cls(draw(HIDDEN, HIDDEN), gate_up, down, draw(QKV, HIDDEN))

    def whole(self, heads: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        x, stream = fused_add_rms_norm(F.linear(heads, self.out), stream, gain, EPS)
        x = F.linear(silu_and_mul(F.linear(x, self.gate_up)), self.down)
        x, stream = fused_add_rms_norm(x, stream, gain, EPS)
        return F.linear(x, self.qkv), stream

    def parts(self, heads: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        x, stream = sum_add_rms_norm(split_linear(heads, self.out), stream, gain, EPS)
        sums = split_linear(silu_and_mul(F.linear(x, self.gate_up)), self.down)
        x, stream = sum_add_rms_norm(sums, stream, gain, EPS)
        return F.linear(x, self.qkv), stream


def layer_us(layers: list[Layer], rows: int, form: str) -> float:
    gain, first = torch.ones_like(layers[0].out[0]), draw(rows, HIDDEN)

    def run(_: int) -> None:
        heads, stream = first, first
        for layer in layers:
            qkv, stream = getattr(layer, form)(heads, stream, gain)
            heads = qkv[:, :HIDDEN].contiguous()

    return chain_us(run, 1) / len(layers)


@contextmanager
def shaped(blocks: Blocks | None) -> Iterator[None]:
    """None: as the engine shapes programs."""
    if blocks is None:
        yield
        return
    with patch.object(rope_attention_triton, "blocks_for", lambda *given: blocks):
        yield


def round_batch(requests: int, queries: int, keys: int) -> tuple[PagedBatch, Tensor]:
    """And the slots of its new tokens. A round's slots lie beside each other, as an engine hands
    them out."""
    table = torch.arange(CONTEXT, device="cuda") * requests
    table = (table + torch.arange(requests, device="cuda")[:, None]) % (SLOTS - 16) + 16
    places = (keys + torch.arange(queries, device="cuda")).expand(requests, queries)
    each = torch.arange(requests + 1, device="cuda")
    batch = PagedBatch(
        req_to_token=table.int(),
        req_pool_indices=each[:-1],
        seq_lens=torch.full_like(each[:-1], keys + queries),
        qo_indptr=each * queries,
        positions=places.reshape(-1).contiguous(),
        max_queries=queries,
        max_keys=CONTEXT,
        counters=torch.zeros(4096, dtype=torch.int32, device="cuda"),
    )
    return batch, table.gather(1, places).view(-1)


def attention_us(layers: list[Layer], requests: int, queries: int, keys: int) -> float:
    batch, slots = round_batch(requests, queries, keys)
    rows = requests * queries
    shape = SLOTS, KV_HEADS, DIM
    caches = [(draw(*shape), draw(*shape)) for _ in layers]
    angles, x = torch.randn(CONTEXT, DIM, device="cuda"), draw(rows, HIDDEN)
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]

    def run(attends: bool) -> None:
        for layer, cache in zip(layers, caches, strict=True):
            q, k, v = (one.view(rows, -1, DIM) for one in F.linear(x, layer.qkv).split(sizes, 1))
            if attends:
                rope_attention(q, k, v, angles, *cache, slots, batch, DIM**-0.5, None, None)

    took = [chain_us(lambda _, attends=attends: run(attends), 1) for attends in (True, False)]  # type: ignore[misc]
    return (took[0] - took[1]) / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 192, 256])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--keys", type=int, nargs="+", default=[60, 200, 280, 700])
    args = parser.parse_args()
    layers, found = [Layer.draw() for _ in range(LAYERS)], list[dict[str, Any]]()
    for rows in args.rows:
        whole, parts = (layer_us(layers, rows, form) for form in ("whole", "parts"))
        found.append({"what": f"layer, {rows} rows", "otherwise us": whole, "taken us": parts})
        print(found[-1], flush=True)
    for requests in args.requests:
        for keys in args.keys:
            few = requests * KV_HEADS < 32
            before = BEFORE[few] if requests * KV_HEADS < 256 else Blocks(64, 2, 2, 128)
            given = layers, requests, 4, keys
            with shaped(before):
                row: dict[str, Any] = {"what": f"attention, {requests} x 4 queries, {keys} keys"}
                row["otherwise us"] = attention_us(*given)
            found.append({**row, "taken us": attention_us(*given)})
            print(found[-1], flush=True)
    print(report.write("kernels", "wide-rows", "Wide layers at 9 to 256 rows", found))


if __name__ == "__main__":
    main()
