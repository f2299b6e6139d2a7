"""Experts in MXFP4 by tiles: errors, microseconds and bytes a second, by rows.

    python -m benchmarks.kernels.mxfp4_experts [--shapes gpt-oss-20b …] [--jobs 12] [--json FILE]
    python -m benchmarks.kernels.mxfp4_experts --few [--json FILE]
    python -m benchmarks.kernels.mxfp4_experts --more [--json FILE]

A layer's two products in a CUDA graph, over the weights of several layers, so that none is read
from a cache; rows choose experts evenly. TB/s are of the chosen experts' weights, each read once;
"copy" is what a plain copy of this card moves. Errors are those against the float32 reference of
dequantised weights, relative, of some rows; "bits" tells whether a row among 64 has those of it
alone. The first form times Triton's tiles (--jobs: processes that compile them, before), the
second those of CUDA C++ at few rows beside Triton's in force, the third those at 8 to 128 rows.
They write `mxfp4-few-rows` and `mxfp4-more-rows`. Errors and bits come before times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from benchmarks.kernels.experts import SHAPES, copy_speed, rows_of
from benchmarks.kernels.mxfp4_layers import FORMAT, LAYERS, Bench, Layer, Variant, multiplied
from specengine.kernels.experts import route_triton
from specengine.kernels.experts.mxfp4_cuda import ManyTile, RowsTile, tile_for
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
FEW = (1, 8, 16, 32, 64)
FEW_SHAPE, TRITON = "gpt-oss-20b", "Triton"
ROWS_TILES = [
    *(RowsTile(2, 8, stages, tiles) for stages in (3, 4, 6) for tiles in (2, 4)),
    *(RowsTile(2, 4, 6, tiles) for tiles in (2, 4, 8)),
    *(RowsTile(4, 8, 3, tiles) for tiles in (1, 2)),
    *(RowsTile(4, 4, 4, tiles) for tiles in (1, 2, 4)),
    *(RowsTile(1, 8, 6, tiles) for tiles in (4, 8)),
]
MORE = (8, 16, 32, 48, 64, 96, 128)
MANY_TILES = [
    *(ManyTile(2, 12, stages, 4) for stages in (4, 6)),
    *(ManyTile(2, 15, stages, 4) for stages in (3, 5)),
    ManyTile(2, 11, 6, 4),
    *(ManyTile(2, warps, 4, 4, 2) for warps in (6, 7)),
    *(ManyTile(4, 8, 3, eights) for eights in (2, 3)),
]


@dataclass(frozen=True)
class Subject:
    """A table of CUDA C++ beside Triton."""

    name: str
    title: str
    rows: tuple[int, ...]
    tiles: list[RowsTile] | list[ManyTile]

    def variants(self, rows: int, chosen: int) -> list[Variant]:
        """Triton's, the one in force, and the others."""
        usual = FORMAT.tiles.tiles_of(rows, SHAPES[FEW_SHAPE].count, chosen)
        now = tile_for(rows, chosen, SHAPES[FEW_SHAPE].count)
        tiles = dict.fromkeys([*([now] if now else []), *self.tiles])
        return [Variant(TRITON, usual), *(Variant(str(one), one) for one in tiles)]


FEW_SUBJECT = Subject("mxfp4-few-rows", "Experts in MXFP4, few rows", FEW, ROWS_TILES)
MORE_SUBJECT = Subject("mxfp4-more-rows", "Experts in MXFP4, 8 to 128 rows", MORE, MANY_TILES)


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


def beside_triton(subject: Subject) -> list[dict[str, Any]]:
    shape = SHAPES[FEW_SHAPE]
    bench = Bench(FEW_SHAPE, [Layer.of(shape, seed) for seed in range(LAYERS[FEW_SHAPE])])
    with precompile():
        for rows in (1, *subject.rows):
            x, chosen = rows_of(shape, rows), bench.picked(rows)[0]
            for one in subject.variants(rows, shape.chosen):
                multiplied(x, chosen, bench.layers[0].weights, one.tiles)
    return bench.table(subject.variants, subject.rows)


def by_rows(subject: Subject, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the filed table for each number of rows."""
    shape, table = SHAPES[FEW_SHAPE], []
    for rows in subject.rows:
        of = {one["variant"]: one for one in found if one["rows"] == rows}
        chosen = str(tile_for(rows, shape.chosen, shape.count) or TRITON)
        us, best = min((one["us"], name) for name, one in of.items() if name != TRITON)
        table.append(
            {
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
    parser.add_argument("--few", action="store_true", help="CUDA C++ at few rows")
    parser.add_argument("--more", action="store_true", help="CUDA C++ at 8 to 128 rows")
    args = parser.parse_args()
    if args.compile:
        compile_part(args.compile)
        return
    if args.few or args.more:
        subject = FEW_SUBJECT if args.few else MORE_SUBJECT
        table = beside_triton(subject)
        _keep(args.json, table)
        _refuse_wrong(table)
        print(report.write("kernels", subject.name, subject.title, by_rows(subject, table)))
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
