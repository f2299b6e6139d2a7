"""Triton's tiles of experts in MXFP4 for few rows: microseconds, errors and bits by tiles.

    python -m benchmarks.kernels.mxfp4_tiles --out FOLDER

Each product's tiles are timed beside those in force of the other product, and the best of both
beside each other, as benchmarks/kernels/mxfp4_experts.py times them. FOLDER/mxfp4-tiles.json holds
those in force, then the fastest first: "gate_up" and "down" at 64 rows of GPT-OSS-20B, "pairs" by
shape and rows; "cuda" are the microseconds of CUDA C++, where it has a tile for so many rows. What
was wrong, or takes too much memory, is in none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.experts import SHAPES, rows_of
from benchmarks.kernels.mxfp4_layers import FORMAT, LAYERS, Bench, Layer, multiplied, some
from specengine.kernels.experts.mxfp4_cuda import tile_for
from specengine.kernels.experts.tiles import Tile, Tiles
from specengine.kernels.precompile import precompile

SHAPE, ROWS = "gpt-oss-20b", 64
PAIR_ROWS = (*((SHAPE, rows) for rows in (64, 48, 32, 16, 8)), ("gpt-oss-120b", 64))
BEST = 3  # of each product, beside each other
NOW = FORMAT.tiles.tiles_of(ROWS, SHAPES[SHAPE].count, SHAPES[SHAPE].chosen)
# Rows, outputs, inputs, warps, stages, turns, registers. A multiprocessor has 65,536 registers: 5
# programs of four warps with 96, 6 with 80.
GATE_UP = [
    *(Tile(16, 32, 128, 4, 4, *more) for more in ((1, 128), (3, 128), (1, 96), (5, 96))),
    *(Tile(16, 32, 128, 4, 4, *more) for more in ((1, 80), (2, 80), (4, 80))),
    *(Tile(16, 32, 256, 4, 3, *more) for more in ((1, None), (1, 128), (1, 96), (5, 96))),
    *(Tile(16, 32, 256, 4, 2, *more) for more in ((1, 96), (1, 80), (2, 80), (4, 80))),
    *(Tile(16, 64, 128, 8, 4, *more) for more in ((1, 128), (1, 80), (2, 80))),
    *(Tile(16, 64, 256, 8, 3, *more) for more in ((1, 128), (1, 80), (2, 80))),
    *(Tile(16, 16, 256, 2, 3, *more) for more in ((1, 128), (2, 96))),
]
# And parts.
DOWN = [
    *((Tile(16, 64, 128, 4, 4, 1, most), 2) for most in (128, 96, 80)),
    *((Tile(16, 64, 128, 4, 4, *more), 1) for more in ((1, None), (3, 128), (1, 96), (2, 80))),
    *((Tile(16, 64, 256, 4, 3, 1, most), 2) for most in (128, 96)),
    *((Tile(16, 64, 256, 4, 3, *more), 1) for more in ((1, 128), (3, 128), (1, 96))),
    *((Tile(16, 64, 256, 4, 2, *more), 1) for more in ((1, 96), (1, 80), (2, 80))),
    *((Tile(16, 128, 128, 8, 4, *more), 1) for more in ((1, 128), (1, 80), (2, 80))),
    *((Tile(16, 128, 256, 8, 3, *more), 1) for more in ((1, 128), (1, 80), (2, 80))),
    *((Tile(16, 32, 256, 2, 3, *more), 1) for more in ((1, 128), (2, 96))),
]


def compile_all(bench: Bench, tiles: Sequence[Tiles], rows: int) -> None:
    x, chosen = rows_of(bench.shape, rows), some(bench.picked(rows)[0], slice(None))
    with precompile():
        for one in tiles:
            multiplied(x, chosen, bench.layers[0].weights, one)


def timed(bench: Bench, rows: int, tiles: Sequence[Tiles]) -> list[dict[str, Any]]:
    """Those in force, then the fastest first."""
    found, (few, expected) = [], bench.expected(rows)
    x, chosen, weights = rows_of(bench.shape, rows), bench.picked(rows)[0], bench.layers[0].weights
    for one in dict.fromkeys((NOW, *tiles)):
        try:
            out = multiplied(x, chosen, weights, one).sum(0)[few].double()
            error = float((out - expected).norm() / expected.norm())
            us = bench.us(rows, one)
        except Exception as problem:  # out of shared memory
            print("left out", one, type(problem).__name__, str(problem)[:80], flush=True)
            continue
        print(f"{bench.name} {rows} {us:7.1f} us error {error:.2g} {one}", flush=True)
        if error < 0.015:
            found.append(asdict(one) | {"us": us, "error": error})
    return found[:1] + sorted(found[1:], key=lambda one: one["us"])


def tiles_in(row: dict[str, Any]) -> Tiles:
    return Tiles(Tile(**row["gate_up"]), Tile(**row["down"]), row["parts"])


def bits(bench: Bench, row: dict[str, Any]) -> bool:
    """Whether a row has those alone that it has among others."""
    rows, tiles = ROWS, tiles_in(row)
    return bench.error(rows, tiles, *bench.expected(rows))[1] is True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    bench = Bench(SHAPE, [Layer.of(SHAPES[SHAPE], seed) for seed in range(LAYERS[SHAPE])])
    gates = [replace(NOW, gate_up=tile) for tile in GATE_UP]
    downs = [replace(NOW, down=tile, parts=parts) for tile, parts in DOWN]
    facts: dict[str, Any] = {"card": torch.cuda.get_device_name(), "pairs": {}, "cuda": {}}

    def keep(**more: Any) -> None:
        facts.update(more, seconds=round(time.monotonic() - began, 1))
        (args.out / "mxfp4-tiles.json").write_text(json.dumps(facts, indent=1))

    compile_all(bench, (NOW, *gates, *downs), ROWS)
    keep(gate_up=timed(bench, ROWS, gates))
    keep(down=timed(bench, ROWS, downs))
    best = ([tiles_in(one) for one in _best(facts[name])] for name in ("gate_up", "down"))
    pairs = [replace(down, gate_up=gate.gate_up) for gate, down in product(*best)]
    for name, rows in PAIR_ROWS:
        if name != bench.name:
            del bench
            torch.cuda.empty_cache()
            bench = Bench(name, [Layer.of(SHAPES[name], seed) for seed in range(LAYERS[name])])
        compile_all(bench, pairs, rows)
        found = timed(bench, rows, pairs)
        if tile := tile_for(rows, bench.shape.chosen, bench.shape.count):
            facts["cuda"][f"{name} {rows}"] = bench.us(rows, tile)
        if (name, rows) == (SHAPE, ROWS):
            compile_all(bench, [tiles_in(one) for one in found[:BEST]], 1)
            for one in found[:BEST]:
                one["bits"] = bits(bench, one)
        facts["pairs"][f"{name} {rows}"] = found
        keep()
    print(f"{facts['seconds']} s, {facts['card']}")


def _best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda one: one["us"])[:BEST]


if __name__ == "__main__":
    main()
