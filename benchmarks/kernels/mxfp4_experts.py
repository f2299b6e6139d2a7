"""Experts in MXFP4 by tiles: errors, microseconds and bytes a second, by rows.

    python -m benchmarks.kernels.mxfp4_experts [--shapes gpt-oss-20b …] [--jobs 12] [--json FILE]
    python -m benchmarks.kernels.mxfp4_experts --rows [--json FILE]

A layer's two products in a CUDA graph, over the weights of several layers, so that none is read
from a cache; rows choose experts evenly. TB/s are of the chosen experts' weights, each read once;
"copy" is what a plain copy of this card moves. Errors are those against the float32 reference of
dequantised weights, relative, of some rows; "bits" tells whether these rows have those of them
alone. The first form times Triton's tiles (--jobs: processes that compile them, before), the
second those of CUDA C++ beside Triton's in force, at 1 to 128 rows: what they add to a chain of
norm, router and the norm that adds up their parts, in which kernels start before others have
ended. It writes `mxfp4-rows`. Errors and bits come before times; of CUDA C++ those of what is
chosen for one row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from benchmarks.kernels.experts import SHAPES, copy_speed, rows_of
from benchmarks.kernels.mxfp4_layers import FORMAT, LAYERS, Bench, Chain, Layer, Variant, multiplied
from specengine.kernels.experts import mxfp4_cuda, route_triton
from specengine.kernels.experts.mxfp4_cuda import AnyTile, tile_for
from specengine.kernels.experts.tiles import Tile, Tiles, are_few
from specengine.kernels.experts.types import Routing
from specengine.kernels.precompile import precompile

ROWS = {"gpt-oss-20b": (1, 8, 64, 256, 2048), "gpt-oss-120b": (1, 8)}
# Sixteen rows of weights a warp: up to 32 of a tile are multiplied a warp, 64 a group of four.
GATES = {
    "8 rows, 2 warps": Tile(8, 16, 128, 2, 4),
    "8 rows, 2 warps, 6 stages": Tile(8, 16, 128, 2, 6),
    "8 rows, 2 warps, 256": Tile(8, 16, 256, 2, 3),
    "8 rows, 4 warps": Tile(8, 32, 128, 4, 4),
    "8 rows, 4 warps, 256": Tile(8, 32, 256, 4, 3),
    "8 rows, 1 warp": Tile(8, 8, 128, 1, 4),
    "16 rows, 2 warps": Tile(16, 16, 128, 2, 4),
    "16 rows, 4 warps": Tile(16, 32, 128, 4, 4),
    "16 rows, 4 warps, 256": Tile(16, 32, 256, 4, 3),
}
_USUAL = "8 rows, 2 warps"
MANY = [(32, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 4, 3), (128, 64, 8, 3)]
SWEPT_ROWS = {"gpt-oss-20b": (1, 2, 4, 8, 16, 32, 64, 128), "gpt-oss-120b": (1, 4, 8, 64)}
TRITON = "Triton"
SWEPT_LAYERS = 2
FEW, MANY_ROWS = mxfp4_cuda.Tile(15, 3, 1), mxfp4_cuda.Tile(15, 3, 4)


def rows_variants(rows: int, chosen: int, count: int) -> list[Variant]:
    """Triton's, that in force, and the others."""
    now = tile_for(rows, chosen, count)
    tiles: list[AnyTile] = [*([now] if now else []), MANY_ROWS]
    tiles += [FEW, mxfp4_cuda.Tile(15, 5, 1), mxfp4_cuda.Tile(12, 4, 1)] if rows <= 32 else []
    usual = FORMAT.tiles.tiles_of(rows, count, chosen)
    return [Variant(TRITON, usual), *(Variant(str(one), one) for one in dict.fromkeys(tiles))]


def variants(rows: int, chosen: int) -> list[Variant]:
    if not are_few(rows, chosen):
        both = (
            (Tile(r, outs, 128, warps, stages), Tile(r, 2 * outs, 128, warps, stages))
            for r, outs, warps, stages in MANY
        )
        return [Variant(str(gate), Tiles(gate, down)) for gate, down in both]
    downs = {name: replace(tile, outs=2 * tile.outs) for name, tile in GATES.items()}
    gate, down = GATES[_USUAL], downs[_USUAL]
    found = [Variant(f"{one} of {_USUAL}", Tiles(gate, down, one)) for one in (1, 2, 3)]
    found += [Variant(f"2, {one}", Tiles(tile, downs[one], 2)) for one, tile in GATES.items()]
    return [*found, Variant("1, 16 rows, 4 warps", Tiles(*_of("16 rows, 4 warps"), 1))]


def _of(name: str) -> tuple[Tile, Tile]:
    return GATES[name], replace(GATES[name], outs=2 * GATES[name].outs)


def compile_part(part: str) -> None:
    """A part of all kernels, over one expert-layer's narrow weights of the same form."""
    own, parts = (int(one) for one in part.split("/"))
    shape = SHAPES["gpt-oss-20b"]
    layer = Layer.of(shape, 0)
    wanted = [(rows, one) for rows in ROWS["gpt-oss-20b"] for one in variants(rows, shape.chosen)]
    for rows, one in wanted[own::parts]:
        x = rows_of(shape, rows)
        chosen = route_triton.route(x, layer.router, Routing(shape.chosen))
        try:
            multiplied(x, chosen, layer.weights, one.tiles)
        except Exception as problem:
            print("left out", rows, one.name, type(problem).__name__, str(problem)[:80])


def beside_triton(path: Path | None) -> list[dict[str, Any]]:
    found = []
    for name, all_rows in SWEPT_ROWS.items():
        shape = SHAPES[name]
        made = partial(rows_variants, count=shape.count)
        bench = Bench(name, [Layer.of(shape, seed) for seed in range(SWEPT_LAYERS)])
        with precompile():
            for rows in all_rows:
                for size, one in product((1, rows), made(rows, shape.chosen)):
                    chain = Chain(shape, bench.layers, size)
                    chain.run(*chain.of[0], one.tiles)
        found += bench.table(made, all_rows, in_chain=True)
        _keep(path, found)
        del bench
        torch.cuda.empty_cache()
    return found


def by_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the filed table for each number of rows."""
    table = []
    for name, rows in dict.fromkeys((one["shape"], one["rows"]) for one in found):
        of = {one["variant"]: one for one in found if (one["shape"], one["rows"]) == (name, rows)}
        shape = SHAPES[name]
        chosen = str(tile_for(rows, shape.chosen, shape.count) or TRITON)
        cuda = [(one["us"], other) for other, one in of.items() if other != TRITON]
        us, best = min(cuda, default=(None, ""))
        table.append(
            {
                "shape": name,
                "rows": rows,
                "Triton us": of[TRITON]["us"],
                "chosen us": of[chosen]["us"],
                "chosen TB/s": of[chosen]["TB/s"],
                "chosen": chosen,
                "best CUDA C++ us": us,
                "best": best,
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(ROWS), metavar="SHAPE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--compile", metavar="PART/PARTS", help=argparse.SUPPRESS)
    parser.add_argument("--rows", action="store_true", help="CUDA C++ at 1 to 128 rows")
    args = parser.parse_args()
    if args.compile:
        compile_part(args.compile)
        return
    if args.rows:
        table = beside_triton(args.json)
        _refuse_wrong(table)
        print(report.write("kernels", "mxfp4-rows", "Experts in MXFP4, by rows", by_rows(table)))
        return
    command = [sys.executable, "-m", "benchmarks.kernels.mxfp4_experts", "--compile"]
    jobs = [subprocess.Popen([*command, f"{part}/{args.jobs}"]) for part in range(args.jobs)]
    for job in jobs:
        job.wait()
    speed = copy_speed()
    print(torch.cuda.get_device_name(), f"a copy moves {speed / 1e12:.2f} TB/s", flush=True)
    table = []
    for name in args.shapes:
        layers = [Layer.of(SHAPES[name], seed) for seed in range(LAYERS[name])]
        table += Bench(name, layers).table(variants, ROWS[name])
        del layers
        torch.cuda.empty_cache()
        _keep(args.json, table, copy=speed)
    print(f"a copy moves {copy_speed() / 1e12:.2f} TB/s at the end", flush=True)
    _refuse_wrong(table)


def _keep(path: Path | None, table: list[dict[str, Any]], **more: float) -> None:
    facts = {"card": torch.cuda.get_device_name(), **more, "rows": table}
    if path is not None:
        path.write_text(json.dumps(facts, indent=1))


def _refuse_wrong(table: list[dict[str, Any]]) -> None:
    wrong = [one for one in table if not one["error"] < 0.015 or one["bits"] is False]
    if wrong:
        raise SystemExit(f"wrong: {wrong[:3]}")


if __name__ == "__main__":
    main()
