"""Experts of Qwen3-Next in FP8 blocks of 128 for dozens of rows, sorted by expert: tiles.

    python -m benchmarks.kernels.block_experts [--rows 64 128 1920] [--json FILE]

Microseconds of a layer's sorting and both products, in a graph over the weights of three layers, by
the tile of each product, the other's as it is in force; rows choose experts evenly. "bytes": to
read the chosen experts once at the speed of a copy. All tiles must give the bits of those in force.
"sorting": the sorting alone. Takes about 60 s on an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.delta_forms import captured
from benchmarks.kernels.experts import Shape, copy_speed
from benchmarks.kernels.fp8_products import in_turns
from benchmarks.kernels.packed_experts import pack
from benchmarks.kernels.quantised import draw
from specengine.kernels.experts import experts_triton, order_triton, packed_triton
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.tiles import Tile, Tiles
from specengine.kernels.experts.types import Chosen
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.precompile import precompile

SHAPE = Shape(2048, 512, 512, 10)
LAYERS, EPS = 3, 1e-6
# Outputs of a program (of the second product twice as many), warps and stages.
PROGRAMS = [*product((32, 64), (4,), (3, 4, 5)), (128, 8, 3), (128, 4, 3)]
REGISTERS = (None, 96, 128)
# Where experts have dozens of rows each: rows of a tile of either product, outputs, warps, stages,
# registers. By 8 warps and 64 rows a multiprocessor has one program, of 128 registers two.
SORTED = [
    *((64, 64, 8, 3, 128), (64, 64, 8, 4, 128), (64, 64, 4, 3, None), (64, 64, 4, 3, 168)),
    *((64, 32, 4, 3, 128), (64, 32, 4, 4, 128), (64, 32, 4, 3, 160), (64, 128, 8, 3, None)),
    *((32, 64, 4, 3, None), (32, 64, 4, 3, 128), (32, 64, 4, 4, 128), (32, 64, 8, 3, 80)),
    *((32, 32, 4, 4, 96), (128, 64, 8, 3, None)),
]

Layer = tuple[Chosen, PackedExpertWeights]


def choose(rows: int, seed: int) -> Chosen:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(rows, SHAPE.count, device="cuda", generator=generator)
    found = scores.topk(SHAPE.chosen)
    return Chosen(found.indices.int(), found.values)


def candidates(usual: Tiles) -> dict[str, Tiles]:
    found = {"in force": usual}
    for outs, warps, stages in PROGRAMS:
        form = {"warps": warps, "stages": stages}
        first = replace(usual.gate_up, outs=outs, **form)
        second = replace(usual.down, outs=2 * outs, **form)
        for registers in REGISTERS if outs < 128 and stages < 5 else (None,):
            told = f"{outs} outs, {warps} warps, {stages} stages, {registers} registers"
            gate_up, down = (replace(one, registers=registers) for one in (first, second))
            found[f"gate_up {told}"] = replace(usual, gate_up=gate_up)
            found[f"down 2 x {told}"] = replace(usual, down=down)
    for rows, outs, warps, stages, registers in SORTED if usual.gate_up.rows >= 32 else ():
        tile = Tile(rows, outs, 128, warps, stages, registers=registers)
        told = f"{rows} rows, {outs} outs, {warps} warps, {stages} stages, {registers} registers"
        found[f"both {told}"] = Tiles(tile, replace(tile, outs=2 * outs))
    return found


def run(x: Tensor, layers: list[Layer], tiles: Tiles | None) -> Tensor:
    for chosen, weights in layers:
        out = experts_triton.experts(x, chosen, weights, tiles)
    return out


def sort(layers: list[Layer], tile: int) -> None:
    for chosen, _ in layers:
        order_triton.order(chosen.ids_TK, SHAPE.count, tile)


def safely(call: Callable[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except Exception as error:  # out of shared memory, or of registers
        torch.cuda.synchronize()
        print("left out:", type(error).__name__, str(error)[:80], flush=True)
        return None


def sweep(rows: int, weights: list[PackedExpertWeights], speed: float) -> dict[str, Any]:
    layers = [(choose(rows, seed), one) for seed, one in enumerate(weights)]
    gain = torch.ones(SHAPE.hidden, device="cuda", dtype=torch.bfloat16)
    # Rounded as the norm before a layer rounds.
    x = rms_norm(draw(rows, SHAPE.hidden), gain, EPS, into=weights[0].gate_up.input)
    usual = packed_triton.tiles_of(weights[0], rows, SHAPE.chosen)
    expected, graphs = run(x, layers, usual), dict[str, torch.cuda.CUDAGraph]()
    for name, tiles in candidates(usual).items():
        out = safely(partial(run, x, layers, tiles))
        if out is None:
            continue
        if not torch.equal(out, expected):
            print("OTHER BITS", name, flush=True)
        graphs[name] = captured(partial(run, x, layers, tiles))
    graphs["sorting"] = captured(partial(sort, layers, usual.gate_up.rows))
    times = in_turns(graphs, LAYERS)
    size = weights[0].gate_up.num_bytes + weights[0].down.num_bytes
    read = sum(len(one.ids_TK.unique()) for one, _ in layers) / LAYERS * size / SHAPE.count
    return {"rows": rows, "bytes": read / speed * 1e6, "us": times}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = count()
    weights = [pack(SHAPE, "fp8-blocks", seeds) for _ in range(LAYERS)]
    with precompile():
        for rows in args.rows:
            usual = packed_triton.tiles_of(weights[0], rows, SHAPE.chosen)
            x, chosen = draw(rows, SHAPE.hidden), choose(rows, 0)
            for tiles in candidates(usual).values():
                experts_triton.experts(x, chosen, weights[0], tiles)
    speed, found = copy_speed(), list[dict[str, Any]]()
    for rows in args.rows:
        found.append(sweep(rows, weights, speed))
        print(f"\n{rows} rows, us a layer; bytes {found[-1]['bytes']:.1f}")
        for name, us in sorted(found[-1]["us"].items(), key=lambda pair: pair[1]):
            print(f"  {us:8.2f}  {name}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "us": found}))


if __name__ == "__main__":
    main()
