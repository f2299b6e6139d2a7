"""Candidates for products of few rows with 4-bit weights (int4_turns.cu) beside what is chosen:
bits compared, then timed in turns.

    python -m benchmarks.kernels.int4_turns [SHAPE...] [--rows 1 4 8] [--json FILE] [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.int4_rows import captured, in_turns, tiled
from benchmarks.kernels.quantised import SHAPES, copies_of, draw, four_bits
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.int4_tiles import (
    FewTile,
    Tile,
    few_rows,
    few_tile,
    parts_of,
    ways_of,
    wide_tile,
)
from specengine.kernels.linear.int4_turn_tiles import TurnTile
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.precompile import precompile

MOST = 227 * 1024
# Outputs of a warp in sixteens, tiles beside each other, ways of a warp, stages of a slot, whether
# x stands in shared memory, and slots before the wait.
BLOCKS: dict[str, list[tuple[int, int, int, int, bool, tuple[int, ...]]]] = {
    "gate_up": [
        (1, 14, 8, 4, True, (0, 1, 2, 3)),
        (1, 14, 8, 2, True, (1, 2, 3, 5)),
        (1, 14, 4, 2, True, (1, 2)),
        (2, 7, 4, 2, True, (0, 1, 2, 3)),
        (2, 7, 2, 2, True, (0, 1)),
        (1, 14, 4, 4, True, (0, 1)),
    ],
    "qkv": [
        (1, 3, 2, 2, True, (0, 1, 2, 3, 4)),
        (1, 3, 1, 1, True, (1, 2, 4)),
        (1, 3, 1, 1, False, (2, 4)),
        (1, 3, 2, 2, False, (2, 4)),
    ],
    "o": [
        (1, 2, 2, 2, True, (0, 1, 2)),
        (2, 1, 1, 1, True, (1, 2)),
        (1, 2, 2, 2, False, (1, 2)),
        (2, 1, 2, 2, False, (1, 2)),
    ],
    "down": [
        (1, 2, 2, 2, True, (1, 2, 3, 5)),
        (2, 1, 2, 2, True, (1, 2, 3)),
        (2, 1, 1, 1, True, (1, 2, 3)),
        (2, 1, 1, 1, False, (1, 2, 3)),
        (2, 1, 2, 2, False, (1, 2, 3)),
        (1, 2, 2, 2, False, (1, 2)),
    ],
}
# Of the kernel of before.
FEW = [(1, 4, True)]


def tiles_of(shape: str, weight: IntWeight, rows: int) -> list[Tile | TurnTile]:
    """Those that fit, with as many slots as do."""
    ways, parts = ways_of(*SHAPES[shape]), parts_of(*SHAPES[shape])
    most = next(n for n in (1, 2, 4, 8) if n >= rows)
    found: list[Tile | TurnTile] = [
        FewTile(n, ways, slots, ahead, parts) for n, slots, ahead in FEW
    ]
    for sixteens, side, mine, line, held, all_early in BLOCKS[shape]:
        needed = SHAPES[shape][1] // 128 // ways * mine // line
        for slots in range(min(needed, 16), 0, -1):
            tile = TurnTile(most, ways, parts, side, mine, line, slots, 0, sixteens, held)
            if tile.shared_bytes(weight, 1) <= MOST:
                found += [replace(tile, early=early) for early in all_early if early <= slots]
                break
    return found


def few(shape: str) -> FewTile:
    """Of the kernel of before, with the shape's order of sums."""
    return FewTile(2, ways_of(*SHAPES[shape]), 2, parts=parts_of(*SHAPES[shape]))


def before(weight: IntWeight, rows: int) -> Tile:
    """What was chosen before."""
    if rows <= few_rows(*weight.shape):
        return few_tile(*weight.shape, rows)
    return wide_tile(weight, rows)


def check(x: Tensor, weight: IntWeight, tile: Tile | TurnTile, expected: Tensor) -> bool:
    """Whether the bits are those of the kernel of before; says so if they are not."""
    out = tiled(x, weight, tile)
    torch.cuda.synchronize()
    if torch.equal(out, expected):
        return True
    print(f"OTHER BITS: {tile}, {len(x)} rows: {int((out != expected).sum())} places", flush=True)
    return False


def time_rows(shape: str, held: list[IntWeight], rows: int, only: str) -> list[dict[str, Any]]:
    x = draw(rows, SHAPES[shape][1])
    tiles = [tile for tile in tiles_of(shape, held[0], rows) if only in str(tile)]
    expected = tiled(x, held[0], few(shape))
    graphs = {"before": captured(partial(tiled, x, tile=before(held[0], rows)), held)}
    shown = {str(tile): tile for tile in tiles}
    for name, tile in shown.items():
        try:
            if check(x, held[0], tile, expected):
                graphs[name] = captured(partial(tiled, x, tile=tile), held)
        except RuntimeError as error:
            print(f"FAILED: {name}, {rows} rows: {error}", flush=True)
    found = []
    for name, all_ in in_turns(graphs, len(held)).items():
        us = statistics.median(all_)
        shared = shown[name].shared_bytes(held[0], 1) if name in shown else 0
        read = held[0].num_bytes / us / 1e6
        found.append({"shape": shape, "form": name, "rows": rows, "us": us, "TB/s": read})
        told = f"{us:7.2f} us {read:5.2f} TB/s {shared:>7} B  {name}"
        print(f"{shape:>8} {rows} rows {told}", flush=True)
    return found


Layer = dict[str, IntWeight]


def run_layers(
    layers: list[Layer], x: Tensor, norm: Tensor, tiles: dict[str, Tile | TurnTile]
) -> Tensor:
    """Products of layers behind each other, with the norms and the activation, and a norm in place
    of attention."""
    stream = x
    for layer in layers:
        qkv = tiled(rms_norm(stream, norm, 1e-6), layer["qkv"], tiles["qkv"])
        heads = rms_norm(qkv[:, : x.shape[1]], norm, 1e-6)
        added = tiled(heads, layer["o"], tiles["o"])
        normed = rms_norm(added, norm, 1e-6)
        gated = act_and_mul(tiled(normed, layer["gate_up"], tiles["gate_up"]), "silu")
        stream = tiled(gated, layer["down"], tiles["down"])
    return stream


def time_layers(figures: list[dict[str, Any]], rows: int, num_layers: int) -> None:
    """The best of each shape together, and in place of each one every other."""
    layers: list[Layer] = []
    for _ in range(num_layers):
        made = {
            name: four_bits(draw(*size, size[1] ** -0.5), True) for name, size in SHAPES.items()
        }
        layers.append(made)
    x, norm = draw(rows, 4096), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    shown, best = {}, {}
    for shape in SHAPES:
        tiles = {str(tile): tile for tile in tiles_of(shape, layers[0][shape], rows)}
        mine = [one for one in figures if (one["shape"], one["rows"]) == (shape, rows)]
        mine.sort(key=lambda one: one["us"])
        tiles["before"] = before(layers[0][shape], rows)
        shown[shape] = [tiles[one["form"]] for one in mine if one["form"] in tiles]
        best[shape] = shown[shape][0]
    combined = {"before": {name: before(layers[0][name], rows) for name in SHAPES}, "best": best}
    for shape, tiles in shown.items():
        for tile in tiles[1:8]:
            combined[f"{shape}: {tile}"] = best | {shape: tile}
    graphs = {}
    for name, tiles in combined.items():
        call = partial(run_layers, layers, norm=norm, tiles=tiles)
        graphs[name] = captured(call, [x])
    print(f"\na layer in a chain of {num_layers}, {rows} rows")
    for name, all_ in sorted(in_turns(graphs, num_layers).items(), key=lambda one: min(one[1])):
        print(f"{statistics.median(all_):7.2f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--only", default="", help="tiles whose name has this")
    parser.add_argument("--layers", type=int, default=8, help="of a chain")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.monotonic()
    weights = {}
    for shape in args.shapes:
        dense = draw(*SHAPES[shape], SHAPES[shape][1] ** -0.5)
        weights[shape] = copies_of(lambda one: four_bits(one, True), dense, 4.19)
    with precompile():
        for shape, held in weights.items():
            for rows in args.rows:
                x = draw(rows, SHAPES[shape][1])
                tiled(x, held[0], before(held[0], rows))
                tiled(x, held[0], few(shape))
                for tile in tiles_of(shape, held[0], rows):
                    if args.only in str(tile):
                        tiled(x, held[0], tile)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    figures = []
    for shape, held in weights.items():
        for rows in args.rows:
            figures += time_rows(shape, held, rows, args.only)
    print("\nbest of each")
    for rows in args.rows:
        sums = [0.0, 0.0]
        for shape in weights:
            mine = [one for one in figures if (one["shape"], one["rows"]) == (shape, rows)]
            best = min(mine, key=lambda one: one["us"])
            old = next(one for one in mine if one["form"] == "before")
            sums[0] += old["us"]
            sums[1] += best["us"]
            told = f"{old['us']:6.2f} -> {best['us']:6.2f}  {best['form']}"
            print(f"{rows} rows {shape:>8}: {told}")
        print(f"{rows} rows, all: {sums[0]:.2f} -> {sums[1]:.2f} us")
    if len(weights) == len(SHAPES):
        weights.clear()
        for rows in args.rows:
            time_layers(figures, rows, args.layers)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
