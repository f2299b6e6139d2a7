"""A layer with a mixture of experts at few rows: microseconds, of Qwen3-30B-A3B.

    python benchmarks/kernels/sparse_layer.py [--rows 1 8] [--keys 158 1000] [--json FILE]

A chain of layers with weights and KV of their own, in one CUDA graph, as a round of the engine runs
them, and with one thing changed: norms of heads by themselves, or the first norm inside the
projection behind it. "error" is how far what the first layer's attention adds to the stream is from
the same with both, relative to it: a few roundings to bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from few_row import chain_us

from specengine.kernels.attention.head_norms import norm_heads
from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.experts import experts_triton, route_triton
from specengine.kernels.experts.types import ExpertWeights, Router, Routing
from specengine.kernels.linear import few_row
from specengine.kernels.linear.norm import rms_norm, sum_add_rms_norm

HIDDEN, HEADS, KV_HEADS, DIM = 2048, 32, 4, 128
COUNT, CHOSEN, INNER = 128, 8, 768
LAYERS, SLOTS, CONTEXT, EPS = 6, 32768, 8192, 1e-6
MOST_ERROR = 0.05


def draw(*size: int, scale: float | None = None) -> Tensor:
    out = torch.empty(size, device="cuda", dtype=torch.bfloat16)
    return out.normal_(std=size[-1] ** -0.5 if scale is None else scale)


@dataclass(frozen=True)
class Layer:
    gain: Tensor
    qkv: Tensor
    norms: HeadNorms
    out: Tensor
    router: Router
    experts: ExpertWeights
    k_cache: Tensor
    v_cache: Tensor

    @classmethod
    def draw(cls) -> Layer:
        gain = 1 + draw(HIDDEN, scale=0.1)
        head_gains = 1 + draw(2, DIM, scale=0.1)
        return cls(
            gain=gain,
            qkv=draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            norms=HeadNorms(head_gains[0], head_gains[1], EPS),
            out=draw(HIDDEN, HEADS * DIM),
            router=Router(draw(COUNT, HIDDEN)),
            experts=ExpertWeights(draw(COUNT, 2 * INNER, HIDDEN), draw(COUNT, HIDDEN, INNER)),
            k_cache=draw(SLOTS, KV_HEADS, DIM, scale=1.0),
            v_cache=draw(SLOTS, KV_HEADS, DIM, scale=1.0),
        )


Projection = Callable[[Tensor, Tensor, Layer], Tensor]


def by_norm(normed: Tensor, stream: Tensor, layer: Layer) -> Tensor:
    return few_row.norm_linear(stream, layer.gain, EPS, layer.qkv)


def by_normed(normed: Tensor, stream: Tensor, layer: Layer) -> Tensor:
    return few_row.linear(normed, layer.qkv)


@dataclass(frozen=True)
class Form:
    name: str
    fuses_norms: bool = True
    projection: Projection = by_normed


APART = Form("norms of heads apart, first norm in the projection", False, by_norm)
FORMS = [
    APART,
    Form("norms of heads apart", False),
    Form("first norm in the projection", True, by_norm),
    Form("engine"),
]


@dataclass(frozen=True)
class Round:
    rows: int
    batch: PagedBatch
    slots: Tensor
    angles: Tensor
    stream: Tensor
    parts: Tensor

    @classmethod
    def draw(cls, rows: int, keys: int) -> Round:
        table = torch.arange(CONTEXT, device="cuda").expand(rows, -1)
        first = torch.arange(rows, device="cuda")[:, None] * (keys + 64) + 16
        table = (table + first) % SLOTS
        each = torch.arange(rows + 1, device="cuda")
        places = torch.full((rows,), keys, device="cuda")
        batch = PagedBatch(
            req_to_token=table.int(),
            req_pool_indices=each[:-1],
            seq_lens=places + 1,
            qo_indptr=each,
            positions=places,
            max_queries=1,
            max_keys=CONTEXT,
            counters=torch.zeros(4096, dtype=torch.int32, device="cuda"),
        )
        turns = torch.arange(CONTEXT, device="cuda")[:, None] * torch.rand(DIM // 2, device="cuda")
        angles = torch.cat([turns.cos(), turns.sin()], -1)
        parts = draw(CHOSEN, rows, HIDDEN, scale=0.3).float()
        return cls(rows, batch, table[:, keys].long(), angles, draw(rows, HIDDEN, scale=1.0), parts)


def run(form: Form, layers: list[Layer], given: Round) -> Tensor:
    parts, stream = given.parts, given.stream
    for layer in layers:
        normed, stream = sum_add_rms_norm(parts, stream, layer.gain, EPS)
        qkv = form.projection(normed, stream, layer).view(given.rows, -1, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        norms: HeadNorms | None = layer.norms
        if not form.fuses_norms:
            heads = q.reshape(-1, 1, DIM), k.reshape(-1, 1, DIM)
            q, k = (one.view(given.rows, -1, DIM) for one in norm_heads(*heads, layer.norms))
            norms = None
        caches = layer.k_cache, layer.v_cache
        out = rope_attention(
            q, k, v, given.angles, *caches, given.slots, given.batch, DIM**-0.5, norms=norms
        )
        stream = few_row.linear_add(out.flatten(1), layer.out, stream)
        normed = rms_norm(stream, layer.gain, EPS)
        chosen = route_triton.route(normed, layer.router, Routing(CHOSEN))
        parts = experts_triton.experts(normed, chosen, layer.experts)
    return stream


def attended(form: Form, layers: list[Layer], given: Round) -> Tensor:
    """What the first layer's attention adds to the stream."""
    before = given.stream + given.parts.sum(0).bfloat16()
    return run(form, layers[:1], given).float() - before.float()


def measure(form: Form, layers: list[Layer], given: Round, expected: Tensor) -> dict[str, Any]:
    error = (attended(form, layers, given) - expected).norm() / expected.norm()
    took = chain_us(lambda _: run(form, layers, given), 1) / len(layers)
    return {"form": form.name, "rows": given.rows, "us a layer": took, "error": error.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--keys", type=int, nargs="+", default=[158, 1000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers, found = [Layer.draw() for _ in range(LAYERS)], list[dict[str, Any]]()
    print(torch.cuda.get_device_name(), flush=True)
    for rows, keys in itertools.product(args.rows, args.keys):
        given = Round.draw(rows, keys)
        expected = attended(APART, layers, given)
        for form in FORMS:
            found.append({"keys": keys, **measure(form, layers, given, expected)})
            print(found[-1], flush=True)
            if not found[-1]["error"] < MOST_ERROR:
                raise SystemExit(f"wrong: {found[-1]}")
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
