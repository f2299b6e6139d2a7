"""Experts in MXFP4 for few rows, by tiles: whether bits are those of the usual kernel, and
microseconds of a layer's part around them.

    python -m benchmarks.kernels.mxfp4_row [--shapes gpt-oss-120b …] [--json FILE]

A CUDA graph of what a layer has from its second norm on: norm, router (two launches), both
products, and the norm that adds up their parts, 24 times, of rows that choose other experts each.
All tiles are timed in turns, and the median counts; "rest" is the same without the products.
Wrong tiles are not timed: a row must have the bits that it has among 64 in the usual kernel, of as
many parts of the columns, and an error below 1.5% of the reference.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.experts import SHAPES, Shape, rows_of, summed
from benchmarks.kernels.mxfp4_layers import Layer, some
from specengine.kernels.experts import mxfp4_cuda, route_triton
from specengine.kernels.experts.experts import experts
from specengine.kernels.experts.mxfp4_cuda import AnyTile, Both, Tile
from specengine.kernels.experts.mxfp4_row_cuda import RowTile
from specengine.kernels.experts.types import Routing
from specengine.kernels.linear.norm import rms_norm, sum_add_rms_norm
from specengine.kernels.precompile import precompile

CALLS, TURNS, EPS, MANY = 24, 15, 1e-5, 64
NOW = Tile(1, 11, 7, 1)
WIDEST = {1: Tile(2, 15, 3, 4), 2: Tile(2, 15, 3, 4, parts=2)}
SECOND = RowTile(6, 4, 5, True)
HALVES = RowTile(6, 2, 2, parts=2)
# A block of the first product and one of the second fit a multiprocessor together.
TILES: list[tuple[AnyTile, int]] = [
    (NOW, 1),
    (Tile(2, 15, 3, 1), 1),
    *((Both(RowTile(6, *one), SECOND), 1) for one in ((3, 2), (2, 3), (2, 2))),
    *((Both(RowTile(6, 4, 2), RowTile(6, 4, 4, one)), 1) for one in (True, False)),
    *((Both(RowTile(6, 2, 2), RowTile(6, 4, 3, one)), 1) for one in (True, False)),
    (Both(RowTile(6, 3, 2), NOW), 1),
    (Both(NOW, RowTile(6, 4, 3, True)), 1),
    *((Both(HALVES, RowTile(6, *one, True, 2, 2)), 2) for one in ((3, 3), (4, 2))),
    (Both(RowTile(6, 3, 2, parts=2), RowTile(6, 3, 3, True, 2, 2)), 2),
    (Both(RowTile(6, 2, 1, parts=2, spread=2), RowTile(6, 3, 3, True, 2, 2)), 2),
    (Both(RowTile(6, 2, 2, parts=2, spread=2), RowTile(6, 4, 3, True, 2)), 2),
]


class Chain:
    """A layer's part, for a number of rows."""

    def __init__(self, shape: Shape, layer: Layer, rows: int) -> None:
        self.layer, self.routing = layer, Routing(shape.chosen)
        generator = torch.Generator("cuda").manual_seed(rows)
        size = (CALLS, rows, shape.hidden)
        self.streams = torch.randn(size, device="cuda", generator=generator).bfloat16()
        self.gain = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.parts = torch.zeros(shape.chosen, *size[1:], device="cuda")

    def run(self, tile: AnyTile | None, calls: int = CALLS) -> Tensor:
        """tile: None leaves out the products."""
        out = self.gain
        for stream in self.streams[:calls]:
            x = rms_norm(stream, self.gain, EPS)
            chosen = route_triton.route(x, self.layer.router, self.routing)
            parts = self.parts
            if tile is not None:
                parts = mxfp4_cuda.experts(x, chosen, self.layer.weights, tile)
            out = sum_add_rms_norm(parts, stream, self.gain, EPS)[0]
        return out

    def captured(self, tile: AnyTile | None) -> torch.cuda.CUDAGraph:
        self.run(tile, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(tile)
        return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Microseconds a call: medians."""
    found: dict[str, list[Any]] = {name: [] for name in graphs}
    for turn in range(TURNS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if turn:
                found[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: median(start.elapsed_time(end) * 1000 / CALLS for start, end in all_)
        for name, all_ in found.items()
    }


def is_right(shape: Shape, layer: Layer, tile: AnyTile, parts: int, rows: int) -> bool:
    x, weights = rows_of(shape, MANY), layer.weights
    chosen = route_triton.route(x, layer.router, Routing(shape.chosen))
    usual = mxfp4_cuda.experts(x, chosen, weights, WIDEST[parts])
    few = some(chosen, slice(0, rows))
    expected = experts(x[:rows], few, weights, backend="torch").double()
    good = True
    for _ in range(3):
        found = mxfp4_cuda.experts(x[:rows], few, weights, tile)
        error = float((summed(found).double() - expected).norm() / expected.norm())
        same = torch.equal(found, usual[:, :rows])
        good = good and same and error < 0.015
    print(f"{rows} rows, error {error:.2g}, bits {same}: {tile}", flush=True)
    return good


def timed(name: str, rows: int, layer: Layer) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    right = [tile for tile, parts in TILES if is_right(shape, layer, tile, parts, rows)]
    chain = Chain(shape, layer, rows)
    graphs = {str(tile): chain.captured(tile) for tile in right}
    graphs["rest"] = chain.captured(None)
    found = in_turns(graphs)
    rest, of = found["rest"], {"shape": name, "rows": rows}
    return [
        of | {"tile": tile, "us a layer": us, "products us": us - rest}
        for tile, us in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["gpt-oss-120b", "gpt-oss-20b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for name in args.shapes:
        layer, shape = Layer.of(SHAPES[name], 0), SHAPES[name]
        if not table:
            with precompile():
                for (tile, _), rows in ((one, rows) for one in TILES for rows in args.rows):
                    Chain(shape, layer, rows).run(tile, 1)
                for tile in WIDEST.values():
                    Chain(shape, layer, MANY).run(tile, 1)
        for rows in args.rows:
            table += timed(name, rows, layer)
            if args.json:
                args.json.write_text(json.dumps(table, indent=1))
        del layer
        torch.cuda.empty_cache()
    for one in sorted(table, key=lambda one: (one["shape"], one["rows"], one["us a layer"])):
        us = f"{one['us a layer']:7.2f} us a layer, products {one['products us']:6.2f}"
        print(f"{one['shape']} {one['rows']} {us}: {one['tile']}")


if __name__ == "__main__":
    main()
