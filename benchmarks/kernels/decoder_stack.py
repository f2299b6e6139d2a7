"""All layers of SmolLM2-135M for few rows: five kernels a layer, and one kernel for all.

    python benchmarks/kernels/decoder_stack.py

Microseconds of all 30 layers, without embedding and head, in a graph that is replayed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))
import report

from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.linear import few_row
from specengine.kernels.linear.decoder_stack import decoder_stack
from specengine.kernels.linear.types import StackShape, StackWeights
from tests.kernels.decoder_stack_cases import Lengths, World, draw_weights

SHAPE = StackShape(576, 9, 3, 64, 1536, 30)
BYTES = 2 * 30 * (576 * SHAPE.qkv + 576 * 576 + 3 * 576 * SHAPE.intermediate)
# Requests, new tokens of each, and the text before them.
CASES = [(1, 1, 160), (1, 4, 160), (2, 4, 160), (8, 1, 160), (4, 4, 160), (16, 1, 160)]
TREES = [(1, 8, 160), (1, 16, 160), (2, 8, 160)]  # nodes in place of new tokens
LONG = [(1, 1, 600), (1, 4, 600), (1, 4, 2000), (1, 4, 8000), (4, 4, 2000)]


def in_kernels(world: World, weights: StackWeights) -> Tensor:
    """As DecoderLayer.forward_few_rows."""
    x, shape, counts = world.x, weights.shape, [SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads]
    for number, layer in enumerate(weights.layers):
        qkv = few_row.norm_linear(x, layer.input_gain, weights.eps, layer.qkv)
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        q, k, v = torch.split(heads, counts, dim=1)
        given = world.kv.k[number], world.kv.v[number], world.kv.loc, world.batch
        out = rope_attention(q, k, v, weights.cos_sin, *given, weights.scale)
        x = few_row.linear_add(out.flatten(1), layer.out, x)
        gates = few_row.norm_gated_linear(x, layer.gain, weights.eps, layer.gate_up)
        x = few_row.linear_add(gates, layer.down, x)
    return x


def in_one(world: World, weights: StackWeights) -> Tensor:
    return decoder_stack(world.x, weights, world.kv, world.batch, backend="cuda").stream


def tree_of(nodes: int) -> list[int]:
    """The parent of each node: four children each, level by level."""
    return [-1, *((node - 1) // 4 for node in range(1, nodes))]


def microseconds(run: Callable[[], Tensor], replays: int = 50) -> float:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / replays)
    return best


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    weights = draw_weights(SHAPE, 8192, "cuda")
    found: list[dict[str, Any]] = []
    cases = [*((*case, False) for case in CASES + LONG), *((*case, True) for case in TREES)]
    for requests, new, prefix, is_tree in cases:
        trees = [tree_of(new)] * requests if is_tree else None
        world = World.draw(weights, [Lengths(prefix, new)] * requests, trees)
        took = {"kernels": microseconds(lambda w=world: in_kernels(w, weights))}  # type: ignore[misc]
        took["one"] = microseconds(lambda w=world: in_one(w, weights))  # type: ignore[misc]
        found.append(
            {
                "requests": requests,
                "rows": requests * new,
                "tree": is_tree,
                "context": prefix,
                "five kernels a layer, us": took["kernels"],
                "one kernel, us": took["one"],
                "ratio": took["kernels"] / took["one"],
                "TB/s of weights": BYTES / took["one"] / 1e6,
            }
        )
        print(found[-1], flush=True)
    print(report.write("kernels", "decoder-stack", "A small model's layers in one kernel", found))


if __name__ == "__main__":
    main()
