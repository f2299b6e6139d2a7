"""Experts in MXFP4 by tiles: errors, microseconds and bytes a second, by rows.

    python -m benchmarks.kernels.mxfp4_experts [--shapes gpt-oss-20b …] [--jobs 12] [--json FILE]
    python -m benchmarks.kernels.mxfp4_experts --few [--json FILE]

A layer's two products in a CUDA graph, over the weights of several layers, so that none is read
from a cache; rows choose experts evenly. TB/s are of the chosen experts' weights, each read once;
"copy" is what a plain copy of this card moves. Errors are those against the float32 reference of
dequantised weights, relative, of some rows; "bits" tells whether a row among 64 has those of it
alone. The first form times Triton's tiles (--jobs: processes that compile them, before), the
second those of CUDA C++ at few rows beside Triton's in force, and writes `mxfp4-few-rows`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from benchmarks.kernels.experts import SHAPES, Shape, copy_speed, graph_us, rows_of, summed
from benchmarks.kernels.packed_experts import mxfp4
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts import experts_triton, mxfp4_cuda, route_triton
from specengine.kernels.experts.experts import experts
from specengine.kernels.experts.mxfp4_cuda import RowsTile, tile_for
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import Tile, Tiles, are_few
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.precompile import precompile

CUDA = "cuda"
FORMAT = load_place(EXPERT_FORMATS["mxfp4"])
LAYERS = {"gpt-oss-20b": 4, "gpt-oss-120b": 2}  # whose weights take turns
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


@dataclass(frozen=True)
class Variant:
    name: str
    tiles: Tiles | RowsTile


def few_variants(rows: int, chosen: int) -> list[Variant]:
    usual = FORMAT.tiles.tiles_of(rows, SHAPES[FEW_SHAPE].count, chosen)
    return [Variant(TRITON, usual), *(Variant(str(one), one) for one in ROWS_TILES)]


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


def multiplied(
    x: torch.Tensor, chosen: Chosen, weights: PackedExpertWeights, tiles: Tiles | RowsTile
) -> torch.Tensor:
    if isinstance(tiles, Tiles):
        return experts_triton.experts(x, chosen, weights, tiles)
    return mxfp4_cuda.experts(x, chosen, weights, tiles)


def draw(rows: int, columns: int, seed: int) -> Mxfp4Weight:
    """Of scales that differ."""
    made = mxfp4(rows, columns, seed)
    generator = torch.Generator(CUDA).manual_seed(seed)
    more = torch.randint(-2, 2, made.scale.shape, device=CUDA, generator=generator)
    return replace(made, scale=(made.scale + more).to(torch.uint8))


@dataclass
class Layer:
    router: Router
    weights: PackedExpertWeights

    @classmethod
    def of(cls, shape: Shape, seed: int) -> Layer:
        generator = torch.Generator(CUDA).manual_seed(seed)
        seeds = count(1000 * seed)

        def normal(*size: int, scale: float) -> torch.Tensor:
            out = torch.empty(size, device=CUDA, dtype=torch.bfloat16)
            return out.normal_(0.0, scale, generator=generator)

        def stack(rows: int, columns: int) -> PackedExperts:
            each = (draw(rows, columns, next(seeds)) for _ in range(shape.count))
            made = PackedExperts.of(FORMAT, shape.count, each)
            assert made is not None
            return made

        weights = PackedExpertWeights(
            stack(2 * shape.inner, shape.hidden),
            stack(shape.hidden, shape.inner),
            normal(shape.count, 2 * shape.inner, scale=0.1),
            normal(shape.count, shape.hidden, scale=0.1),
            shape.activation,
        )
        return cls(Router(normal(shape.count, shape.hidden, scale=shape.hidden**-0.5)), weights)


def some(chosen: Chosen, rows: Any) -> Chosen:
    return Chosen(chosen.ids_TK[rows].contiguous(), chosen.weights_TK[rows].contiguous())


@dataclass
class Bench:
    name: str
    layers: list[Layer]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    def picked(self, rows: int) -> list[Chosen]:
        x, routing = rows_of(self.shape, rows), Routing(self.shape.chosen)
        return [route_triton.route(x, layer.router, routing) for layer in self.layers]

    def expected(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows are looked at, and what the reference gives of them."""
        x, chosen, weights = rows_of(self.shape, rows), self.picked(rows)[0], self.layers[0].weights
        few = torch.linspace(0, rows - 1, min(rows, 3), device=CUDA).long()
        return few, experts(x[few], some(chosen, few), weights, backend="torch").double()

    def error(
        self, rows: int, tiles: Tiles | RowsTile, few: torch.Tensor, expected: torch.Tensor
    ) -> tuple[float, bool | None]:
        """Of some rows, and whether the first one alone has the same bits."""
        x, chosen, weights = rows_of(self.shape, rows), self.picked(rows)[0], self.layers[0].weights
        out = multiplied(x, chosen, weights, tiles)
        error = (summed(out)[few].double() - expected).norm() / expected.norm()
        same = None
        if are_few(*chosen.ids_TK.shape):
            alone = multiplied(x[:1], some(chosen, slice(0, 1)), weights, tiles)
            same = torch.equal(alone[:, 0], out[:, 0])
        return float(error), same

    def us(self, rows: int, tiles: Tiles | RowsTile) -> float:
        x = rows_of(self.shape, rows)
        pairs = zip(self.picked(rows), self.layers, strict=True)
        return graph_us(
            [
                lambda c=c, w=one.weights: multiplied(x, c, w, tiles)  # type: ignore[misc]
                for c, one in pairs
            ]
        )

    def read_bytes(self, rows: int) -> float:
        weights = self.layers[0].weights
        size = (weights.gate_up.num_bytes + weights.down.num_bytes) / self.shape.count
        picked = self.picked(rows)
        return size * sum(len(one.ids_TK.unique()) for one in picked) / len(picked)

    def table(
        self, made: Callable[[int, int], list[Variant]], all_rows: Sequence[int]
    ) -> list[dict[str, Any]]:
        found = []
        for rows in all_rows:
            moved, expected = self.read_bytes(rows), self.expected(rows)
            for one in made(rows, self.shape.chosen):
                try:
                    error, same = self.error(rows, one.tiles, *expected)
                    us = self.us(rows, one.tiles)
                except Exception as problem:  # out of shared memory
                    print(rows, one.name, type(problem).__name__, str(problem)[:80], flush=True)
                    continue
                row = {"shape": self.name, "rows": rows, "variant": one.name, "us": us}
                found.append(row | {"TB/s": moved / us / 1e6, "error": error, "bits": same})
                print(
                    f"{self.name} {rows:5d} {us:7.1f} us {moved / us / 1e6:5.2f} TB/s "
                    f"error {error:.2g} bits {same} {one.name}",
                    flush=True,
                )
        return found


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


def few() -> list[dict[str, Any]]:
    shape = SHAPES[FEW_SHAPE]
    bench = Bench(FEW_SHAPE, [Layer.of(shape, seed) for seed in range(LAYERS[FEW_SHAPE])])
    with precompile():
        for rows in FEW:
            x, chosen = rows_of(shape, rows), bench.picked(rows)[0]
            for one in few_variants(rows, shape.chosen):
                multiplied(x, chosen, bench.layers[0].weights, one.tiles)
    return bench.table(few_variants, FEW)


def by_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the filed table for each number of rows."""
    shape, table = SHAPES[FEW_SHAPE], []
    for rows in FEW:
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
    args = parser.parse_args()
    if args.compile:
        compile_part(args.compile)
        return
    if args.few:
        table = few()
        _keep(args.json, table)
        _refuse_wrong(table)
        title = "Experts in MXFP4, few rows"
        print(report.write("kernels", "mxfp4-few-rows", title, by_rows(table)))
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
