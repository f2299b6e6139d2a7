"""Experts in 8 and 4 bits in Triton beside those in bfloat16: errors, and microseconds by rows.

    python -m benchmarks.kernels.packed_experts [--json FILE] [--sweep]
        [--cases qwen3-30b-a3b:fp8-blocks …]

Formats: FP8 in blocks and by row, MXFP4; whole numbers of 4 bits in groups of 128 (int4: symmetric
AWQ, GPTQ and W4A16; int4-zeros; int4-order: act-order) and of 8; blocks of GGUF that are kept. As
benchmarks/kernels/experts.py: a layer's two products in a CUDA graph, over the weights of
several layers; rows choose experts evenly. "limit" is the time to read the chosen experts once at
the speed that this card copies at. --sweep: tiles too, each compared with those in force. What is
wrong is said so, and not timed. All is compiled before, on all cores.
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
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import PACKED, Tile, Tiles, are_few
from specengine.kernels.experts.types import Chosen, Router, Routing
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight
from specengine.kernels.precompile import precompile

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
DEEP = [(16, 4, 8), (32, 4, 6), (32, 4, 8), (64, 4, 6), (64, 8, 6)]  # where steps have one width
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


def whole_numbers(
    bits: int,
    group: int = 128,
    scales: torch.dtype = torch.bfloat16,
    zeros: torch.dtype | None = None,
    has_order: bool = False,
) -> Callable[[int, int, int], IntWeight]:
    """zeros: their type; of float32 no whole numbers."""
    middle = (1 << (bits - 1)) + (0.25 if zeros == torch.float32 else 0)

    def make(rows: int, columns: int, seed: int) -> IntWeight:
        step = columns**-0.5 * 12**0.5 / 2**bits  # codes are drawn evenly
        scale = torch.full((rows, columns // group), step, device=CUDA)
        zero = None if zeros is None else torch.full_like(scale, middle, dtype=zeros)
        generator = torch.Generator(CUDA).manual_seed(seed)
        order = torch.randperm(columns, device=CUDA, generator=generator) if has_order else None
        codes = _bytes(rows, columns * bits // 8, seed)
        return IntWeight(codes, scale.to(scales), zero, bits, group, order)

    return make


def mxfp4(rows: int, columns: int, seed: int) -> Mxfp4Weight:
    exponent = 127 - round(torch.tensor(float(columns)).log2().item() / 2 + 1.5)
    scale = torch.full((rows, columns // 32), exponent, dtype=torch.uint8, device=CUDA)
    return Mxfp4Weight(_bytes(rows, columns // 2, seed), scale)


FORMATS: dict[str, tuple[str, Callable[[int, int, int], Any]]] = {
    "fp8-blocks": ("fp8", fp8_blocks),
    "fp8-rows": ("fp8", fp8_rows),
    "mxfp4": ("mxfp4", mxfp4),
    "int4": ("int", whole_numbers(4)),
    "int4-zeros": ("int", whole_numbers(4, zeros=torch.uint8)),
    "int4-order": ("int", whole_numbers(4, has_order=True)),
    "int8": ("int", whole_numbers(8)),
    # Blocks of GGUF, as layers/quantization/gguf.py keeps them.
    "q4_0": ("int", whole_numbers(4, 32, torch.float16)),
    "q4_k": ("int", whole_numbers(4, 32, torch.float32, torch.float32)),
    "q6_k": ("int", whole_numbers(8, 16, torch.float32)),
    "q8_0": ("int", whole_numbers(8, 32, torch.float16)),
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


def candidates(rows: int, weights: PackedExpertWeights) -> list[Tiles]:
    """Those that differ for this format, whose steps take no more columns than share a scale."""
    most = weights.down.format.operands(weights.down, torch.bfloat16, None).most_columns
    if not are_few(rows, 8):
        narrow = (changed(one, stages=6) for one in MANY if most < 128)
        return [changed(one, inputs=min(one.gate_up.inputs, most)) for one in (*MANY, *narrow)]
    usual = PACKED.tiles_of(rows, 128, 8)
    usual, found = changed(usual, inputs=min(usual.gate_up.inputs, most)), list[Tiles]()
    widths = sorted({min(columns, most) for columns in (128, 256)})
    for columns in widths:
        for outs, warps, stages in (*FEW, *(DEEP if len(widths) == 1 else ())):
            found.append(replace(usual, gate_up=Tile(16, outs, columns, warps, stages)))
            found.append(replace(usual, down=Tile(16, 2 * outs, columns, warps, stages)))
    return list(dict.fromkeys(found))


def changed(tiles: Tiles, **fields: int) -> Tiles:
    """Of both products."""
    both = (replace(one, **fields) for one in (tiles.gate_up, tiles.down))
    return replace(tiles, **dict(zip(("gate_up", "down"), both, strict=True)))


def compile_all(bench: Bench, weights: PackedExpertWeights, sweeps: bool) -> None:
    with precompile():
        for rows in ROWS:
            x = rows_of(bench.shape, rows)
            chosen = route_triton.route(x, bench.routers[0], Routing(bench.shape.chosen))
            wanted = candidates(rows, weights) if sweeps and rows in SWEPT else []
            for tiles in (None, *wanted):
                experts_triton.experts(x, chosen, weights, tiles)
            for _ in switched(weights):
                experts_triton.experts(x, chosen, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:FORMAT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    cases = [tuple(one.split(":")) for one in args.cases]
    speed = copy_speed()
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy": speed, "cases": []}
    print(report["card"], f"a copy moves {speed / 1e12:.2f} TB/s", flush=True)
    bench, swept = None, []
    for name, form in cases:
        if bench is None or bench.shape is not SHAPES[name]:
            bench = Bench.of(SHAPES[name], speed)
        layers = [pack(bench.shape, form, count()) for _ in range(LAYERS)]
        compile_all(bench, layers[0], args.sweep)
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
    for name, value in switched(layers[0]):
        wrong = check(bench.shape, bench.routers[0], layers[0], {})
        print(name, value, wrong or "is right", flush=True)
        found[f"{name} {value} us"] = {rows: bench.us(rows, layers) for rows in ROWS}
    return found


def switched(weights: PackedExpertWeights) -> Iterator[tuple[str, bool]]:
    """Each of these switches in turn, and the value that it has meanwhile."""
    switches = {Fp8Weight: [(packed_triton, "ROUNDS_INSIDE")]}
    for module, name in switches.get(weights.gate_up.format.holds, []):
        before = getattr(module, name)
        setattr(module, name, not before)
        try:
            yield name, not before
        finally:
            setattr(module, name, before)


def sweep(bench: Bench, layers: list[PackedExpertWeights]) -> Iterator[dict[str, Any]]:
    for rows in SWEPT:
        found = []
        x, chosen = rows_of(bench.shape, rows), bench.picked(rows)[0]
        truth = summed(experts_triton.experts(x, chosen, layers[0])).double()
        for tiles in candidates(rows, layers[0]):
            try:
                out = summed(experts_triton.experts(x, chosen, layers[0], tiles)).double()
                error = ((out - truth).norm() / truth.norm()).item()
                took = bench.us(rows, layers, tiles)
            except Exception as problem:  # out of shared memory
                torch.cuda.synchronize()
                print(rows, tiles, type(problem).__name__, str(problem)[:80], flush=True)
                continue
            if not error < 0.015:
                print(f"{rows} rows, wrong by {error:.3g}: {tiles}", flush=True)
                continue
            found.append({"rows": rows, "us": took, "gate_up": str(tiles.gate_up)})
            found[-1]["down"] = str(tiles.down)
        now = bench.us(rows, layers)
        print(f"  {rows} rows {now:.1f} us with the tiles in force", flush=True)
        found.sort(key=lambda one: one["us"])
        for one in found[:6]:
            print(f"  {rows} rows {one['us']:.1f} us {one['gate_up']} {one['down']}", flush=True)
        yield {"rows": rows, "us": now, "gate_up": "in force", "down": "in force"}
        yield from found


if __name__ == "__main__":
    main()
