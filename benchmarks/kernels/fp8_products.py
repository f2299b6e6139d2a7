"""FP8 products of few rows in the order of a layer: checked, then microseconds by tile.

    python -m benchmarks.kernels.fp8_products [--blocks] [--json FILE] [--no-sweep]

--blocks: scales of blocks of 128, else of rows. Products of codes are compared with float64, and
each row with itself beside other rows, bit for bit; those in CUDA C++ with Triton's of as many
splits; what norms and the activation round, with what the product would. Then each tile at each
layer of an 8B, its inputs rounded before it, in a captured graph over copies of the weight that
exceed the L2 cache; then all products of a layer with the norms and the activation between them,
over the weights of several layers, a norm of the queries in attention's place. Graphs are replayed
in turns. Takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.quantised import L2_BYTES, SHAPES, draw, expected, scaled_mm
from specengine.kernels.linear import (
    activation_triton,
    fp8_codes_triton,
    fp8_linear_cuda,
    fp8_linear_triton,
    norm_triton,
)
from specengine.kernels.linear.fp8_codes import BLOCK
from specengine.kernels.linear.fp8_linear import fp8_linear, quantise_rows
from specengine.kernels.linear.fp8_linear_cuda import RowsTile
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.kernels.linear.rounded import found_beside
from specengine.kernels.linear.split_sum_triton import Tile
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
SWEPT_ROWS = (1, 8, 16, 32, 64, 96, 128, 256)
LAYERS = 8
EPS = 1e-5
# Outs, warps, stages and rows of programs; a narrower one has no FP8 product.
PROGRAMS = (
    *((64, 4, stages, 64) for stages in (3, 4, 6)),
    *((128, 4, stages, 64) for stages in (3, 4, 6)),
    *((64, 4, stages, 128) for stages in (3, 4, 6)),
    (128, 8, 3, 128),
)
MOST_SHARED = 220 << 10
ROWS_TILES = [RowsTile(splits, slots) for splits, slots in product((1, 2, 4), (4, 5, 6, 8))]
TURNS = 12

AnyTile = Tile | RowsTile
Layer = dict[str, Fp8Weight]


def tiles(is_by_block: bool) -> list[Tile]:
    step = BLOCK if is_by_block else 256
    return [
        Tile(outs, step, splits, warps, stages, rows=rows)
        for (outs, warps, stages, rows), splits in product(PROGRAMS, (1, 2, 4))
        if stages * step * (outs + rows) <= MOST_SHARED
    ]


def made(shape: tuple[int, int], is_by_block: bool = False) -> Fp8Weight:
    """Random codes and scales, of a deviation of about columns ** -0.5."""
    codes = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 32).to(FP8)
    rows, columns = (BLOCK, BLOCK) if is_by_block else (1, shape[1])
    scale = torch.rand(shape[0] // rows, shape[1] // columns, device="cuda") * shape[1] ** -0.5 / 16
    return Fp8Weight(codes, scale, rows, columns, Fp8Input(group=BLOCK if is_by_block else None))


def check_rounding() -> bool:
    """Whether norms and the activation round as the product would."""
    same = True
    for rows in (1, 9, 64):
        x, stream, gain = draw(rows, 4096), draw(rows, 4096, 30), draw(1, 4096)[0]
        wide = draw(rows, 2 * 14336, 5)
        for one in (
            norm_triton.rms_norm(x, gain, EPS, True),
            norm_triton.fused_add_rms_norm(x, stream, gain, EPS, True)[0],
            activation_triton.act_and_mul(wide, "silu", True),
        ):
            kept = found_beside(one, Fp8Input())
            assert kept is not None
            codes, scale = fp8_linear_triton.quantise_rows(one, Fp8Input())
            alike = torch.equal(kept[0].view(torch.uint8), codes.view(torch.uint8))
            same = same and alike and torch.equal(kept[1], scale)
    return same


def tiled(tile: AnyTile | None, x: Tensor, weight: Fp8Weight) -> Tensor:
    """tile: None for the one in force of Triton's kernel."""
    assert weight.input is not None
    codes, scale = quantise_rows(x, weight.input)
    if isinstance(tile, RowsTile):
        return fp8_linear_cuda.fp8_linear(codes, scale, weight, None, x.dtype, tile)
    return fp8_codes_triton.fp8_linear(codes, scale, weight, None, x.dtype, tile)


def check(
    tile: AnyTile | None, weight: Fp8Weight, x: Tensor, truth: Tensor, step: int
) -> dict[str, Any]:
    """Largest error of a row beside its largest value, whether a row alone is itself, and whether
    rows are Triton's. The tile in force has other bits beyond 64 rows."""
    worst, same, like_triton = 0.0, True, True
    for rows in (
        (1, 5, 8) if isinstance(tile, RowsTile) else (1, 5, 16, 64, 128)[: 5 if tile else 4]
    ):
        out = tiled(tile, x[:rows], weight)
        error = (out.double() - truth[:rows]).abs().amax(1) / truth[:rows].abs().amax(1)
        worst = max(worst, float(error.max()))
        for row in {0, rows // 2, rows - 1}:
            alone = tiled(tile, x[row : row + 1], weight)
            same = same and torch.equal(alone[0], out[row])
        if isinstance(tile, RowsTile):
            like = tiled(Tile(64, step, tile.splits, 4, 3), x[:rows], weight)
            like_triton = like_triton and torch.equal(like, out)
    found = {"tile": str(tile), "error": worst, "row alone equal": same}
    return found | ({"bits of Triton": like_triton} if isinstance(tile, RowsTile) else {})


def captured(call: Callable[[Any], Tensor], weights: Sequence[Any]) -> torch.cuda.CUDAGraph:
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
    """Microseconds a call: medians of replays, each graph once a turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return {name: sorted(one)[len(one) // 2] for name, one in times.items()}


def sweep(is_by_block: bool) -> list[dict[str, Any]]:
    found = []
    for shape, size in SHAPES.items():
        weights = [
            made(size, is_by_block) for _ in range(max(2, -(-L2_BYTES // (size[0] * size[1]))))
        ]
        for rows in SWEPT_ROWS:
            x = draw(rows, size[1])
            given = [*tiles(is_by_block), *(ROWS_TILES if rows <= fp8_linear_cuda.ROWS else ())]
            graphs = {str(tile): captured(partial(tiled, tile, x), weights) for tile in given}
            graphs["in force"] = captured(partial(fp8_linear, x), weights)
            if not is_by_block:
                graphs["scaled_mm"] = captured(partial(scaled_mm, x), weights)
            times = in_turns(graphs, len(weights))
            where = {"shape": shape, "rows": rows}
            found += [where | {"call": name, "us": us} for name, us in times.items()]
            best = sorted((us, name) for name, us in times.items())[:4]
            told = "; ".join(f"{us:.1f} {name}" for us, name in best)
            print(f"{shape:>8} {rows:>3}: in force {times['in force']:.1f}; {told}", flush=True)
    return found


def layer_chain(
    multiply: Callable[[Tensor, Fp8Weight], Tensor],
    hidden: Tensor,
    stream: Tensor,
    gain: Tensor,
    rounds: bool | int,
    layers: Sequence[Layer],
) -> Tensor:
    """All of the layers but attention, in whose place a norm of the queries stands. rounds: norms
    and the activation round what the products read, whole rows or as many columns together."""
    for layer in layers:
        normed, stream = norm_triton.fused_add_rms_norm(hidden, stream, gain, EPS, rounds)
        heads = multiply(normed, layer["qkv"])[:, : SHAPES["o"][1]]
        hidden = multiply(norm_triton.rms_norm(heads, gain, EPS), layer["o"])
        normed, stream = norm_triton.fused_add_rms_norm(hidden, stream, gain, EPS, rounds)
        inner = activation_triton.act_and_mul(multiply(normed, layer["gate_up"]), "silu", rounds)
        hidden = multiply(inner, layer["down"])
    return hidden


def by_scaled_mm(x: Tensor, weight: Fp8Weight) -> Tensor:
    codes, scale = quantise_rows(x, Fp8Input())
    w_scale = weight.scale.view(1, -1)
    return torch._scaled_mm(codes, weight.codes.t(), scale, w_scale, out_dtype=x.dtype)


def chains(is_by_block: bool) -> list[dict[str, Any]]:
    layers = [
        {name: made(size, is_by_block) for name, size in SHAPES.items()} for _ in range(LAYERS)
    ]
    read = sum(a * b for a, b in SHAPES.values())
    gain = torch.ones(SHAPES["o"][0], device="cuda", dtype=torch.bfloat16)
    rounding, found = BLOCK if is_by_block else True, []
    for rows in ROWS:
        given = draw(rows, SHAPES["o"][0]), draw(rows, SHAPES["o"][0]), gain
        ways = {"chosen": fp8_linear, "Triton": partial(tiled, None)}
        if not is_by_block:
            ways["scaled_mm"] = by_scaled_mm
        graphs = {
            name + told: captured(partial(layer_chain, multiply, *given, rounds), [layers])
            for name, multiply in ways.items()
            for rounds, told in (
                (False, ""),
                (rounding, ", rounded by norms"),
            )
        }
        us = in_turns(graphs, LAYERS)
        told = ", ".join(f"{name} {one:.1f} ({read / one / 1e6:.2f})" for name, one in us.items())
        print(f"layer without attention, {rows} rows, us (TB/s): {told}")
        found.append({"rows": rows, **us})
    return found


def compile_all(tiles: Sequence[AnyTile | None], is_by_block: bool) -> None:
    """On all cores, before anything is timed."""
    size = SHAPES["o"]
    weight = made(size, is_by_block)
    with precompile():
        for rows, tile in product((1, 32, 64, 128), tiles):
            if rows == 1 or not isinstance(tile, RowsTile):
                tiled(tile, draw(rows, size[1]), weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", action="store_true", help="scales of blocks of 128")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--no-sweep", action="store_true", help="time the chosen tiles alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    chosen = [fp8_linear_cuda.tile_for(*size, args.blocks) for size in SHAPES.values()]
    swept_tiles = () if args.no_sweep else (*tiles(args.blocks), *ROWS_TILES)
    checked: list[AnyTile | None] = [None, *chosen, *swept_tiles]
    compile_all(checked, args.blocks)
    same = check_rounding()
    print("norms and the activation round as the product would:", same)
    weight, x = made(SHAPES["o"], args.blocks), draw(128, SHAPES["o"][1])
    truth = expected(x, weight)
    step = BLOCK if args.blocks else 256
    checks = [check(tile, weight, x, truth, step) for tile in checked]
    for one in checks:
        print(one)
    assert same, "a row is rounded otherwise"
    assert all(one["error"] < 0.01 and one["row alone equal"] for one in checks), "a tile is wrong"
    assert all(one.get("bits of Triton", True) for one in checks), "a row has other bits"
    swept = [] if args.no_sweep else sweep(args.blocks)
    layers = chains(args.blocks)
    if args.json is not None:
        facts = {"environment": environment(), "checks": checks, "tiles": swept, "layers": layers}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
