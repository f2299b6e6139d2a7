"""Products with 4-bit weights on a GPU: tiles of the CUDA kernels checked, then timed in turns.

    python -m benchmarks.kernels.int4_rows [few] [turns] [wide] [--json FILE] [--seconds N]

Each tile is compared with a product in float64 of the same codes, and its rows with those of the
kernel for few rows that has its order of sums, bit for bit (of a tile that rounds weights, with
its own among fewer rows). Then all tiles of a shape and a number of rows beside what is chosen,
Triton, a dequantised weight and one of bfloat16: captured graphs over copies of the weight that
exceed the L2 cache, replayed by turns; medians are told, and a layer's sum of what is chosen.
Layers of an 8B, groups of 128. All kinds take about a minute on an H200; what is chosen replaces
its table if all shapes were timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

from benchmarks.kernels.quantised import SHAPES, copies_of, draw, expected, four_bits
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear import dequantise_triton, int_linear_cuda, int_linear_triton
from specengine.kernels.linear.int4_tiles import (
    FewTile,
    WideTile,
    blocks_of,
    parts_of,
    ways_of,
)
from specengine.kernels.linear.int4_turn_tiles import TurnTile, tile_of
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
TURN_ROWS = (1, 4, 8)
TURNS = 9
# Outputs in sixteens, stages, and whether x is loaded ahead.
FEW = [(2, 2), (2, 4), (4, 2), (2, 2, True)]
# Warps, most rows in eights, stages, and whether weights are rounded.
WIDE = [
    *((16, 8, 4), (12, 8, 4), (8, 8, 4), (8, 8, 3), (4, 8, 8), (4, 8, 4), (8, 16, 3)),
    *((8, 16, 4, True), (12, 16, 3, True), (12, 16, 4, True)),
]
TITLE = "Products with 4-bit weights"
Call = Callable[[Tensor, IntWeight], Tensor]
AnyTile = FewTile | WideTile | TurnTile


def turns_of(shape: str) -> list[AnyTile]:
    """With slots before the wait as chosen, with none, one and all."""
    found: list[AnyTile] = []
    for rows in TURN_ROWS:
        if (tile := tile_of(*SHAPES[shape], rows, 2, True)) is not None:
            found += [replace(tile, early=n) for n in sorted({0, 1, tile.early, tile.slots})]
    return found


def tiles_of(kinds: Sequence[str], shape: str) -> list[AnyTile]:
    """With the order of sums that the shape has."""
    ways, parts = ways_of(*SHAPES[shape]), parts_of(*SHAPES[shape])
    found: dict[str, list[AnyTile]] = {
        "turns": turns_of(shape),
        "few": [FewTile(n, ways, *rest, parts=parts) for n, *rest in FEW],
        "wide": [
            WideTile(n, most, ways, parts, blocks, *rest)
            for blocks, (n, most, *rest) in product(blocks_of(parts), WIDE)
        ],
    }
    return [tile for kind in kinds for tile in found[kind]]


def tiled(x: Tensor, weight: IntWeight, tile: AnyTile) -> Tensor:
    return int_linear_cuda.int_linear(x, weight, None, tile)


def triton(x: Tensor, weight: IntWeight) -> Tensor:
    return int_linear_triton.int_linear(x, weight, None)


def dequantise(x: Tensor, weight: IntWeight) -> Tensor:
    return dequantise_triton.dequantise(weight, x.dtype)


def dequantised(x: Tensor, weight: IntWeight) -> Tensor:
    return F.linear(x, dequantise_triton.dequantise(weight, x.dtype))


def is_timed(tile: AnyTile, weight: IntWeight, rows: int) -> bool:
    if isinstance(tile, FewTile):
        return rows <= 32
    if isinstance(tile, TurnTile):
        return rows == tile.rows
    if tile.shared_bytes(weight, tile.eights_of(rows)) > MOST_SHARED:
        return False
    least = 64 if tile.most_eights == 16 else 8
    return least <= rows <= 16 * tile.most_eights


def forms(kinds: Sequence[str], shape: str, weight: IntWeight, rows: int) -> dict[str, Call]:
    """What is timed with so many rows."""
    found: dict[str, Call] = {"chosen": int_linear}
    if rows >= 16:
        found["Triton"] = triton
    if rows >= 64:
        found |= {"dequantised": dequantised, "dequantising alone": dequantise}
    for tile in tiles_of(kinds, shape):
        if is_timed(tile, weight, rows):
            found[str(tile)] = partial(tiled, tile=tile)
    return found


def compile_all(kinds: Sequence[str], weight: IntWeight) -> None:
    """On all cores, before anything is timed."""
    with precompile():
        for shape, rows in product(SHAPES, ROWS):
            for call in forms(kinds, shape, weight, rows).values():
                call(draw(rows, weight.shape[1]), weight)


def few_of(tile: AnyTile) -> FewTile:
    """A tile for few rows that has the order of sums of another one."""
    if isinstance(tile, FewTile):
        return tile
    return FewTile(2, tile.ways, 2, parts=tile.parts)


def check(kinds: Sequence[str], weight: IntWeight) -> list[dict[str, Any]]:
    """Largest error of each tile beside the largest value, and in how many places its rows are not
    what the kernel for few makes of them one by one."""
    found: list[dict[str, Any]] = []
    x = draw(max(ROWS), weight.shape[1])
    truth = expected(x, weight)
    tiles = {tile for shape in SHAPES for tile in tiles_of(kinds, shape)}
    for tile in sorted(tiles, key=str):
        rounded = isinstance(tile, WideTile) and tile.rounded
        alone = tiled(x[:64], weight, tile) if rounded else tiled(x[:16], weight, few_of(tile))
        compiled = {tile.eights_of(rows) for rows in ROWS if is_timed(tile, weight, rows)}
        for rows in (64, len(x)) if rounded else (1, 7, 16, 32, 37, 100, len(x)):
            most = tile.rows if isinstance(tile, TurnTile) else rows
            if tile.eights_of(rows) not in compiled or rows > most:
                continue
            out = tiled(x[:rows], weight, tile)
            error = float((out.double() - truth[:rows]).abs().max() / truth[:rows].abs().max())
            found.append(
                {"form": str(tile), "rows": rows, "error": error, "other bits": other(out, alone)}
            )
    return found


def other(out: Tensor, alone: Tensor) -> int:
    """In how many places their first rows differ."""
    rows = min(len(out), len(alone))
    return int((out[:rows] != alone[:rows]).sum())


def check_kinds() -> list[dict[str, Any]]:
    """Other types and groups with the tiles that are chosen: the largest errors, and in how many
    places the first rows of 40 are not those of 8."""
    found = []
    for dtype, group, scale_type, has_zero in product(
        (torch.bfloat16, torch.float16), (32, 64, 128), (torch.float16, torch.float32), (0, 1, 2)
    ):
        codes = torch.randint(0, 16, (1000, 1152), dtype=torch.uint8, device="cuda")
        scale = torch.rand(1000, 1152 // group, device="cuda").to(scale_type)
        zeros = (None, torch.randint_like(scale.byte(), 17), torch.randn_like(scale.float()) + 8)
        weight = IntWeight.pack(codes, scale, zeros[has_zero], 4)
        x = draw(40, 1152).to(dtype)
        truth = expected(x, weight)
        alone = int_linear(x[:8], weight, backend="cuda")
        for rows in (1, 8, 9, 40):
            out = int_linear(x[:rows], weight, backend="cuda")
            error = float((out.double() - truth[:rows]).abs().max() / truth.abs().max())
            name = f"{dtype} {group} {scale_type} {has_zero}"
            found.append(
                {"form": name, "rows": rows, "error": error, "other bits": other(out, alone)}
            )
    return found


def captured(call: Callable[[Any], Tensor], held: Sequence[Any]) -> Any:
    call(held[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in held:
            call(weight)
    return graph


def in_turns(graphs: dict[str, Any], count: int) -> dict[str, list[float]]:
    """Microseconds a call of each replay."""
    events = defaultdict(list)
    for turn in range(TURNS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if turn:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) * 1000 / count for start, end in all_]
        for name, all_ in events.items()
    }


def time_shape(
    kinds: Sequence[str], shape: str, wrong: set[str], until: float
) -> list[dict[str, Any]]:
    weight = draw(*SHAPES[shape], SHAPES[shape][1] ** -0.5)
    held = copies_of(lambda one: four_bits(one, True), weight, 4.19)
    dense: list[Any] = [dequantise_triton.dequantise(one, torch.bfloat16) for one in held]
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        if time.monotonic() > until:
            print(f"{shape}: no time for {rows} rows")
            break
        x = draw(rows, weight.shape[1])
        graphs = {
            name: captured(partial(call, x), held)
            for name, call in forms(kinds, shape, held[0], rows).items()
            if name not in wrong
        }
        graphs["bfloat16"] = captured(partial(F.linear, x), dense)
        for name, all_ in in_turns(graphs, len(held)).items():
            us = statistics.median(all_)
            read = held[0].num_bytes / us / 1e6
            found.append({"shape": shape, "form": name, "rows": rows, "us": us, "TB/s": read})
    return found


def print_shape(shape: str, found: Sequence[dict[str, Any]]) -> None:
    print(f"\n{shape} {list(SHAPES[shape])}, us a product (TB/s of 4-bit weights)")
    print(f"{'form':>52}" + "".join(f"{rows:>14}" for rows in ROWS))
    for name in dict.fromkeys(one["form"] for one in found):
        timed = {one["rows"]: one for one in found if one["form"] == name}
        cells = (
            f"{timed[rows]['us']:.1f} ({timed[rows]['TB/s']:.2f})" if rows in timed else ""
            for rows in ROWS
        )
        print(f"{name:>52}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def print_layer(figures: Sequence[dict[str, Any]]) -> None:
    """The sum of a layer's products as they are chosen."""
    for rows in ROWS:
        us = [one["us"] for one in figures if (one["form"], one["rows"]) == ("chosen", rows)]
        if len(us) == len(SHAPES):
            print(f"a layer's products, {rows} rows: {sum(us):.1f} us")


def table(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is chosen beside the others, a row a layer and a number of rows."""
    us = {(one["shape"], one["rows"], one["form"]): one for one in figures}
    found = []
    for (shape, (outs, columns)), rows in product(SHAPES.items(), ROWS):
        chosen = us[shape, rows, "chosen"]
        row = {"layer": f"{shape} {columns} -> {outs}", "rows": rows, "chosen": chosen["us"]}
        row["TB/s"] = chosen["TB/s"]
        for form in ("Triton", "dequantised", "bfloat16"):
            row[form] = us.get((shape, rows, form), {}).get("us")
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ("few", "turns", "wide")
    parser.add_argument("kinds", nargs="*", default=list(kinds), help="few, turns, wide; all")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop timing after so many")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"no kind of tile: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    until = time.monotonic() + args.seconds
    torch.manual_seed(0)
    made = four_bits(draw(*SHAPES["o"], SHAPES["o"][1] ** -0.5), True)
    assert made.zero is not None
    made = replace(made, zero=torch.randint_like(made.zero, 17))
    compile_all(args.kinds, made)
    print(f"compiled; {until - time.monotonic():.0f} s left", flush=True)
    checks = check(args.kinds, made) + check_kinds()
    for one in checks:
        if one["other bits"] or not one["error"] < 0.01:
            print(one)
    print("largest error", max(one["error"] for one in checks), flush=True)
    wrong = {one["form"] for one in checks if not one["error"] < 0.01}
    figures = []
    for shape in SHAPES:
        figures += (found := time_shape(args.kinds, shape, wrong, until))
        print_shape(shape, found)
    print_layer(figures)
    if args.json is not None:
        facts = {"environment": environment(), "checks": checks, "figures": figures}
        args.json.write_text(json.dumps(facts, indent=1))
    if figures and figures[-1]["shape"] == list(SHAPES)[-1] and figures[-1]["rows"] == ROWS[-1]:
        print(report.write("kernels", "int4-rows", TITLE, table(figures)))


if __name__ == "__main__":
    main()
