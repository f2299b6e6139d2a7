"""Fused attention of many rows a request (trees, long chains) on a GPU: programs that take tiles of
16 rows of a KV head, and programs that take all of them.

    python benchmarks/kernels/tree_rows.py

Microseconds a layer of SmolLM2-135M, 30 dependent calls in one graph. "auto" is what the engine
takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from decoder_stack import SHAPE, microseconds, tree_of

from specengine.kernels.attention import rope_attention_triton as kernel
from tests.kernels.decoder_stack_cases import Lengths, World, draw_weights

# Requests, new tokens of each, and the text before them.
TREES = [
    (requests, 16, context)
    for requests, contexts in (
        (1, (160, 2000, 8000)),
        (2, (160, 2000)),
        (4, (160, 1000, 4000)),
        (8, (160, 1000, 3000)),
        (16, (160, 1000)),
    )
    for context in contexts
]
CHAINS = [(2, 9, 160), (2, 9, 2000), (8, 9, 160), (8, 9, 1000), (8, 9, 3000), (16, 9, 1000)]


class Attention:
    """Of all layers, each with KV of its own."""

    def __init__(self, world: World, angles: Tensor, scale: float) -> None:
        def draw(heads: int) -> Tensor:
            return torch.randn(rows, heads, SHAPE.head_dim, device="cuda").bfloat16()

        rows = len(world.x)
        self.world, self.angles, self.scale = world, angles, scale
        self.q, self.k, self.v = draw(SHAPE.heads), draw(SHAPE.kv_heads), draw(SHAPE.kv_heads)

    def run(self) -> Tensor:
        out, kv = self.q, self.world.kv
        for layer in range(SHAPE.num_layers):
            given = self.angles, kv.k[layer], kv.v[layer], kv.loc, self.world.batch
            out = kernel.rope_attention(out, self.k, self.v, *given, self.scale, None, None)
        return out

    def us(self) -> float:
        return microseconds(self.run) / SHAPE.num_layers


def all_rows(_dtype: object, _dim: object, _groups: object, wanted: int, _device: object) -> int:
    return int(max(16, triton.next_power_of_2(wanted)))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    weights = draw_weights(SHAPE, 16384, "cuda")
    found: list[dict[str, Any]] = []
    cases = [*((*case, True) for case in TREES), *((*case, False) for case in CHAINS)]
    for requests, new, context, is_tree in cases:
        trees = [tree_of(new)] * requests if is_tree else None
        world = World.draw(weights, [Lengths(context, new)] * requests, trees)
        attention = Attention(world, weights.cos_sin, weights.scale)
        row: dict[str, Any] = {"requests": requests, "rows of each": new, "tree": is_tree}
        row["context"] = context
        with patch.object(kernel, "rows_for", all_rows):
            row["all rows us"] = attention.us()
        with patch.object(kernel, "rows_for", lambda *_: 16):
            row["tiles us"] = attention.us()
        row["taken us"] = attention.us()
        found.append(row)
        print(row, flush=True)
    print(
        report.write("attention", "tree-rows", "Attention of many rows a request, in tiles", found)
    )


if __name__ == "__main__":
    main()
