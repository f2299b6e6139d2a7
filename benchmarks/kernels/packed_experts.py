"""Experts in 8 and 4 bits in Triton beside those in bfloat16: errors, and microseconds by rows.

    python -m benchmarks.kernels.packed_experts [--json FILE] [--sweep] [--compile PART/PARTS]
        [--cases qwen3-30b-a3b:fp8-blocks …]

As benchmarks/kernels/experts.py: a layer's two products in a CUDA graph, over the weights of
several layers; rows choose experts evenly. "limit" is the time to read the chosen experts once at
the speed that this card copies at. --sweep: tiles too. --compile only compiles a part of what would
be timed, so that several processes can do it side by side before. A format that is wrong is said
so, and not timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.experts import (
    SHAPES,
    Shape,
    copy_speed,
    draw,
    graph_us,
    rows_of,
    summed,
)
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts import experts_triton, packed_triton, route_triton
from specengine.kernels.experts.experts import experts
from specengine.kernels.experts.formats import int_codes
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import PACKED, Tile, Tiles, are_few
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight

CASES = [
    "qwen3-30b-a3b:fp8-blocks",
    "qwen3-30b-a3b:int4",
    "gpt-oss-20b:mxfp4",
    "qwen3-30b-a3b:fp8-rows",
]
CUDA = "cuda"
LAYERS = 4  # whose weights take turns
ROWS = (1, 4, 16, 64, 256, 2048)
SWEPT = (1, 16, 64, 256, 2048)
FEW = [(16, 4, 4), (32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 8, 3)]  # outs of gate, warps, stages
MANY = [
    Tiles(Tile(rows, outs, 128, warps, 3), Tile(rows, 2 * outs, 128, warps, 3))
    for rows, outs, warps in ((16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 64, 8), (128, 64, 8))
]


def fp8_blocks(rows: int, columns: int, seed: int) -> Fp8Weight:
    scale = torch.full((-(-rows // 128), -(-columns // 128)), columns**-0.5 / 32, device=CUDA)
    return Fp8Weight(_fp8(rows, columns, seed), scale, 128, 128, Fp8Input(group=128))


def fp8_rows(rows: int, columns: int, seed: int) -> Fp8Weight:
    scale = torch.full((rows, 1), columns**-0.5 / 32, device=CUDA)
    return Fp8Weight(_fp8(rows, columns, seed), scale, 1, columns, Fp8Input())


def int4(rows: int, columns: int, seed: int) -> IntWeight:
    scale = torch.full((rows, columns // 128), columns**-0.5 / 4.6, device=CUDA)
    return IntWeight(_bytes(rows, columns // 2, seed), scale.bfloat16(), None, 4, 128)


def mxfp4(rows: int, columns: int, seed: int) -> Mxfp4Weight:
    exponent = 127 - round(torch.tensor(float(columns)).log2().item() / 2 + 1.5)
    scale = torch.full((rows, columns // 32), exponent, dtype=torch.uint8, device=CUDA)
    return Mxfp4Weight(_bytes(rows, columns // 2, seed), scale)


FORMATS: dict[str, tuple[str, Callable[[int, int, int], Any]]] = {
    "fp8-blocks": ("fp8", fp8_blocks),
    "fp8-rows": ("fp8", fp8_rows),
    "int4": ("int", int4),
    "mxfp4": ("mxfp4", mxfp4),
}


def _fp8(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return (32 * torch.randn(rows, columns, device=CUDA, generator=generator)).to(FP8)


def _bytes(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    made = torch.randint(0, 256, (rows, columns), device=CUDA, generator=generator)
    return made.to(torch.uint8)


def pack(shape: Shape, name: str, seeds: Iterator[int]) -> PackedExpertWeights:
    place, make = FORMATS[name]
    form = load_place(EXPERT_FORMATS[place])

    def stack(rows: int, columns: int) -> PackedExperts:
        each = (make(rows, columns, next(seeds)) for _ in range(shape.count))
        made = PackedExperts.of(form, shape.count, each)
        assert made is not None
        return made

    both = stack(2 * shape.inner, shape.hidden), stack(shape.hidden, shape.inner)
    if not shape.has_bias:
        return PackedExpertWeights(*both, activation=shape.activation)
    biases = (
        0.1 * torch.randn(shape.count, width, device=CUDA).bfloat16()
        for width in (2 * shape.inner, shape.hidden)
    )
    return PackedExpertWeights(*both, *biases, activation=shape.activation)


def check(
    shape: Shape, router: Router, weights: PackedExpertWeights, found: dict[str, Any]
) -> str | None:
    """Against the reference, which rounds inputs and activations alike. found: takes the errors.
    Returns what is wrong."""
    found["errors"] = {}
    for rows in (1, 16, 64, 300):
        x = rows_of(shape, rows)
        chosen = route_triton.route(x, router, Routing(shape.chosen))
        some = torch.linspace(0, rows - 1, min(rows, 4), device=CUDA).long()
        own = Chosen(chosen.ids_TK[some], chosen.weights_TK[some])
        expected = experts(x[some], own, weights, backend="torch").double()
        out = summed(experts_triton.experts(x, chosen, weights))[some].double()
        error = ((out - expected).norm() / expected.norm()).item()
        found["errors"][rows] = error
        if not error < 0.015:  # what falls on the other side of a middle is a step of FP8 off
            return f"{rows} rows, error {error:.3g}"
    alone = experts_triton.experts(x[:1], _cut(chosen, 1), weights)[:, 0]
    beside = experts_triton.experts(x[:64], _cut(chosen, 64), weights)[:, 0]
    return None if torch.equal(alone, beside) else "a row depends on the rows beside it"


def _cut(chosen: Chosen, rows: int) -> Chosen:
    return Chosen(chosen.ids_TK[:rows].contiguous(), chosen.weights_TK[:rows].contiguous())


@dataclass
class Bench:
    shape: Shape
    routers: list[Router]
    speed: float  # bytes a second
    dense_us: dict[int, float]  # by rows, of weights in bfloat16

    @classmethod
    def of(cls, shape: Shape, speed: float) -> Bench:
        drawn = [draw(shape, seed) for seed in range(LAYERS)]
        made = cls(shape, [router for router, _ in drawn], speed, {})
        made.dense_us |= {rows: made.us(rows, [one for _, one in drawn]) for rows in ROWS}
        return made

    def picked(self, rows: int) -> list[Chosen]:
        x, routing = rows_of(self.shape, rows), Routing(self.shape.chosen)
        return [route_triton.route(x, router, routing) for router in self.routers]

    def us(self, rows: int, layers: list[Any], tiles: Tiles | None = None) -> float:
        x = rows_of(self.shape, rows)
        pairs = zip(self.picked(rows), layers, strict=True)
        return graph_us(
            [lambda c=c, w=w: experts_triton.experts(x, c, w, tiles) for c, w in pairs]  # type: ignore[misc]
        )

    def limit_us(self, rows: int, num_bytes: int) -> float:
        """num_bytes: of all experts of a layer."""
        picked = self.picked(rows)
        read = sum(len(one.ids_TK.unique()) for one in picked) / len(picked)
        return read * num_bytes / self.shape.count / self.speed * 1e6


def candidates(rows: int) -> list[Tiles]:
    if not are_few(rows, 8):
        return MANY
    usual = PACKED.tiles_of(rows, 128, 8)
    found = []
    for columns in (128, 256):
        for outs, warps, stages in FEW:
            found.append(replace(usual, gate_up=Tile(16, outs, columns, warps, stages)))
            found.append(replace(usual, down=Tile(16, 2 * outs, columns, warps, stages)))
    return found


def compile_part(shape: Shape, weights: PackedExpertWeights, router: Router, part: str) -> None:
    own, parts = (int(one) for one in part.split("/"))
    wanted = [(rows, tiles) for rows in (1, 2048) for tiles in (None, *candidates(rows))]
    for rows, tiles in wanted[own::parts]:
        x = rows_of(shape, rows)
        chosen = route_triton.route(x, router, Routing(shape.chosen))
        try:
            experts_triton.experts(x, chosen, weights, tiles)
        except Exception as error:
            print("left out", rows, tiles, type(error).__name__, str(error)[:80], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:FORMAT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", metavar="PART/PARTS")
    args = parser.parse_args()
    cases = [tuple(one.split(":")) for one in args.cases]
    if args.compile:
        for name, form in cases:
            router, _ = draw(replace(SHAPES[name], inner=32), 0)
            compile_part(SHAPES[name], pack(SHAPES[name], form, count()), router, args.compile)
        return
    speed = copy_speed()
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy": speed, "cases": []}
    print(report["card"], f"a copy moves {speed / 1e12:.2f} TB/s", flush=True)
    bench, swept = None, []
    for name, form in cases:
        if bench is None or bench.shape is not SHAPES[name]:
            bench = Bench.of(SHAPES[name], speed)
        layers = [pack(bench.shape, form, count()) for _ in range(LAYERS)]
        report["cases"].append({"shape": name, "format": form} | measure(bench, form, layers))
        swept.append((bench, layers, report["cases"][-1]))
        write(args.json, report)
    for bench, layers, case in swept if args.sweep else ():
        print(case["shape"], case["format"], flush=True)
        case["sweep"] = list(sweep(bench, layers))
        write(args.json, report)
    raise SystemExit(int(any("us" not in one for one in report["cases"])))


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1))


def measure(bench: Bench, form: str, layers: list[PackedExpertWeights]) -> dict[str, Any]:
    found: dict[str, Any] = {"bf16 us": bench.dense_us}
    try:
        wrong = check(bench.shape, bench.routers[0], layers[0], found)
    except Exception as error:  # it does not compile, say
        wrong = f"{type(error).__name__} {error}"[:300]
    if wrong is not None:
        print(form, "is wrong:", wrong, flush=True)
        return found
    size = layers[0].gate_up.num_bytes + layers[0].down.num_bytes
    found["limit us"] = {rows: bench.limit_us(rows, size) for rows in ROWS}
    found["us"] = {rows: bench.us(rows, layers) for rows in ROWS}
    found |= variants(bench, layers)
    for kind, values in found.items():
        if kind != "errors":
            print(form, kind, {rows: round(us, 1) for rows, us in values.items()}, flush=True)
    return found


def variants(bench: Bench, layers: list[PackedExpertWeights]) -> dict[str, dict[int, float]]:
    """With the other value of each switch of the kernels that concerns the format."""
    found = {}
    switches: dict[type, list[tuple[Any, str]]] = {
        Fp8Weight: [(packed_triton, "ROUNDS_INSIDE")],
        IntWeight: [(int_codes, "LOOKS_UP")],
        Mxfp4Weight: [],
    }
    for module, name in switches[layers[0].gate_up.format.holds]:
        before = getattr(module, name)
        setattr(module, name, not before)
        wrong = check(bench.shape, bench.routers[0], layers[0], {})
        print(name, not before, wrong or "is right", flush=True)
        found[f"{name} {not before} us"] = {rows: bench.us(rows, layers) for rows in ROWS}
        setattr(module, name, before)
    return found


def sweep(bench: Bench, layers: list[PackedExpertWeights]) -> Iterator[dict[str, Any]]:
    for rows in SWEPT:
        found = []
        for tiles in candidates(rows):
            try:
                took = bench.us(rows, layers, tiles)
            except Exception as error:  # out of shared memory
                torch.cuda.synchronize()
                print(rows, tiles, type(error).__name__, str(error)[:80], flush=True)
                continue
            found.append({"rows": rows, "us": took, "gate_up": str(tiles.gate_up)})
            found[-1]["down"] = str(tiles.down)
        found.sort(key=lambda one: one["us"])
        for one in found[:6]:
            print(f"  {rows} rows {one['us']:.1f} us {one['gate_up']} {one['down']}", flush=True)
        yield from found


if __name__ == "__main__":
    main()
