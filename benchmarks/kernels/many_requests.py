"""Fused attention of many requests: what it adds to a chain of first projections.

    python benchmarks/kernels/many_requests.py

Microseconds a layer inside one graph, each with weights and KV of its own, slots as an engine
hands them out. "peeled": as for few requests, with places in 64 bits, which is how it was for all.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from few_row import chain_us
from layer_tail import draw
from wide_rows import CONTEXT, SLOTS, round_batch

from specengine.kernels import rope_attention_triton as kernel
from specengine.kernels.rope_attention_blocks import Blocks

LAYERS = 12


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    dim: int
    before: Blocks  # of 64 requests and more


SHAPES = [
    Shape("8B", 32, 8, 128, Blocks(64, 2, 2, 128)),
    Shape("135M", 9, 3, 64, Blocks(128, 4, 1, 128)),
]


class Model:
    """Projections and caches of some layers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hidden = shape.heads * shape.dim
        sizes = [self.hidden, *[shape.kv_heads * shape.dim] * 2]
        self.sizes = sizes
        self.weights = [draw(sum(sizes), self.hidden) for _ in range(LAYERS)]
        cache = SLOTS, shape.kv_heads, shape.dim
        self.caches = [(draw(*cache), draw(*cache)) for _ in range(LAYERS)]
        self.angles = torch.randn(CONTEXT, shape.dim, device="cuda")

    def attention_us(self, requests: int, queries: int, keys: int) -> float:
        batch, slots = round_batch(requests, queries, keys)
        rows, dim = requests * queries, self.shape.dim
        x = draw(rows, self.hidden)

        def run(attends: bool) -> None:
            for weight, cache in zip(self.weights, self.caches, strict=True):
                parts = F.linear(x, weight).split(self.sizes, 1)
                q, k, v = (one.view(rows, -1, dim) for one in parts)
                if attends:
                    given = slots, batch, dim**-0.5, None, None
                    kernel.rope_attention(q, k, v, self.angles, *cache, *given)

        took = [chain_us(lambda _, attends=one: run(attends), 1) for one in (True, False)]  # type: ignore[misc]
        return (took[0] - took[1]) / LAYERS


@contextmanager
def peeled(blocks: Blocks) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(kernel, "blocks_for", lambda *given: blocks))
        stack.enter_context(patch.object(kernel, "_NARROW", 0))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--keys", type=int, nargs="+", default=[160, 280])
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        model = Model(shape)
        for given in itertools.product(args.requests, args.queries, args.keys):
            few = replace(shape.before, keys=128, warps=4, min_share=1024)
            with peeled(few if given[0] * shape.kv_heads < 512 else shape.before):
                before = model.attention_us(*given)
            names = dict(zip(("requests", "queries", "keys"), given, strict=True))
            now = model.attention_us(*given)
            found.append({"model": shape.name, **names, "peeled us": before, "now us": now})
            print(found[-1], flush=True)
    print(report.write("many-requests", "Fused attention of many requests", found))


if __name__ == "__main__":
    main()
