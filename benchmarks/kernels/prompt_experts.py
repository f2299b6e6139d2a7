"""Tiles of experts over the rows of prompts, sorted by expert.

    python -m benchmarks.kernels.prompt_experts [--cases gpt-oss-20b:mxfp4 qwen3-next:fp8-blocks]
        [--rows 2048 8000] [--json FILE]

Microseconds of a layer's sorting and both products, in a graph over the weights of two layers; rows
choose experts evenly. Each product's tile is timed beside the one in force of the other product.
"widened": the weights before, where the format does so at this size. "Tflop/s": the products alone
would take that rate, padding not counted. A tile whose results differ from those in force by more
than a rounding is named, and not timed. Takes about 30 s a case on an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.experts import SHAPES, Shape, draw, graph_us, rows_of, summed
from benchmarks.kernels.packed_experts import pack
from specengine.kernels.experts import experts_triton, widened_triton
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.packed_triton import tiles_of
from specengine.kernels.experts.tiles import WHOLE, Tile, Tiles
from specengine.kernels.experts.types import Chosen
from specengine.kernels.precompile import precompile
from specengine.kernels.sizes import cdiv

KNOWN = SHAPES | {"qwen3-next": Shape(2048, 512, 512, 10), "deepseek-v2": Shape(2048, 1408, 64, 6)}
CASES = ("gpt-oss-20b:mxfp4", "qwen3-next:fp8-blocks")
LAYERS = 2
# Rows, rows of the weight, columns of a step, warps, stages, registers. FP8 in blocks takes 128
# columns, which share a scale.
PROGRAMS = (
    *((64, 64, 128, 4, 3, None), (64, 128, 128, 4, 3, None), (64, 128, 128, 8, 3, None)),
    *((64, 128, 128, 8, 3, 128), (64, 128, 128, 4, 4, None), (64, 128, 128, 4, 2, None)),
    *((128, 64, 128, 4, 3, None), (128, 64, 128, 4, 2, None), (128, 64, 256, 4, 2, None)),
    *((64, 64, 256, 4, 3, None), (64, 64, 256, 4, 2, None), (128, 128, 128, 8, 3, None)),
    *((32, 128, 128, 4, 3, None), (32, 128, 128, 4, 4, None), (256, 64, 128, 8, 3, None)),
)

Layer = tuple[Chosen, Any]


def choose(shape: Shape, rows: int, seed: int) -> Chosen:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(rows, shape.count, device="cuda", generator=generator)
    found = scores.topk(shape.chosen)
    return Chosen(found.indices.int(), found.values)


def candidates(now: Tiles) -> Iterator[Tiles]:
    for rows, outs, columns, warps, stages, registers in PROGRAMS:
        tile = Tile(rows, outs // 2, columns, warps, stages, registers=registers)
        # Both products take tiles of as many rows: the slots are sorted once.
        yield Tiles(tile, replace(now.down, rows=rows))
        yield Tiles(replace(now.gate_up, rows=rows), replace(tile, outs=outs))


def measure(shape: Shape, form: str, rows: int) -> Iterator[dict[str, Any]]:
    seeds = count()
    layers: list[Layer] = []
    for _ in range(LAYERS):
        weights: Any = draw(shape, next(seeds))[1] if form == "bf16" else pack(shape, form, seeds)
        layers.append((choose(shape, rows, next(seeds)), weights))
    x = rows_of(shape, rows)
    packed = isinstance(layers[0][1], PackedExpertWeights)
    part = cdiv(rows, cdiv(rows, experts_triton.SLICE))  # that go through together
    now = (
        tiles_of(layers[0][1], part, shape.chosen)
        if packed
        else WHOLE.tiles_of(part, shape.count, shape.chosen)
    )

    def run(tiles: Tiles, layer: int = 0) -> torch.Tensor:
        return summed(experts_triton.experts(x, *layers[layer], tiles))

    wanted = [now, *candidates(now)]
    with precompile():
        for tiles in wanted:
            run(tiles)
    expected = run(now).double()
    if rows <= experts_triton.SLICE and packed and widened_triton.takes(x, *layers[0]):
        calls = [lambda n=n: experts_triton.experts(x, *layers[n]) for n in range(LAYERS)]  # type: ignore[misc]
        us, out = graph_us(calls), experts_triton.experts(x, *layers[0]).double()
        error = ((out - expected).norm() / expected.norm()).item()
        yield {"rows": rows, "us": us, "widened": True, "error": error}
    flops = 2 * 3 * rows * shape.chosen * shape.hidden * shape.inner
    for tiles in wanted:
        try:
            error = ((run(tiles).double() - expected).norm() / expected.norm()).item()
        except Exception as problem:  # out of shared memory
            torch.cuda.synchronize()
            print(f"  left out {tiles}: {str(problem)[:80]}", flush=True)
            continue
        if error > 1e-2:
            print(f"  wrong by {error:.3g}: {tiles}", flush=True)
            continue
        us = graph_us([lambda n=n, t=tiles: run(t, n) for n in range(LAYERS)])  # type: ignore[misc]
        yield {"rows": rows, "us": us, "tflops": flops / us / 1e6, "error": error} | asdict(tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:FORMAT")
    parser.add_argument("--rows", nargs="+", type=int, default=[2048, 8000])
    parser.add_argument("--slice", type=int, help="rows that go through together")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    experts_triton.SLICE = args.slice or experts_triton.SLICE
    report: list[dict[str, Any]] = []
    for case in args.cases:
        name, form = case.split(":")
        for rows in args.rows:
            found = list(measure(KNOWN[name], form, rows))
            for one in found:
                if "widened" in one:
                    print(f"{case}, {rows} rows, widened: {one['us']:.0f} us, {one['error']:.4f}")
            first, *others = [one for one in found if "widened" not in one]
            print(f"{case}, {rows} rows: {first['us']:.0f} us, {first['tflops']:.0f} Tflop/s now")
            for one in sorted(others, key=lambda one: float(one["us"]))[:12]:
                up, down = (_said(one[which]) for which in ("gate_up", "down"))
                rate = f"{one['us']:8.0f} us {one['tflops']:5.0f} Tflop/s"
                print(f"  {rate}  {up}  {down}", flush=True)
            report += [{"case": case} | one for one in found]
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1))


def _said(tile: dict[str, Any]) -> str:
    names = "rows", "outs", "inputs", "warps", "stages", "registers"
    return "/".join(str(tile[name]) for name in names)


if __name__ == "__main__":
    main()
