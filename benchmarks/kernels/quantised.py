"""Products with FP8 and 4-bit weights on a GPU: checked, then microseconds at the layers of an 8B.

    python benchmarks/kernels/quantised.py [--json FILE] [--no-sweep] [--forms "int4 zeros" q4_k …]

Forms beside FP8: 4 bits in groups of 128 (symmetric AWQ, GPTQ, W4A16), the same with whole zeros,
and blocks of GGUF that are kept. Each kernel is first compared with a product in float64 of the
same codes, and each row with itself beside other rows, bit for bit. Then every form at every number
of rows beside torch.matmul in bfloat16 and torch._scaled_mm, inputs rounded in time; then the tiles
of the Triton kernels that widen weights, at few rows (of codes on both sides: fp8_products.py).
Weights are copied until they exceed the L2 cache, and a time is that of a captured graph over the
copies. All forms take some two minutes on an H100, half of which compiles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from specengine.kernels.linear import fp8_linear_triton, int_linear_triton
from specengine.kernels.linear.fp8_linear import fp8_linear
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight
from specengine.kernels.linear.split_sum_triton import Tile
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

# Outputs and inputs.
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWEPT_ROWS = (1, 8, 32, 64)
TILES = tuple(
    Tile(outs, columns, splits, warps, stages)
    for (outs, warps), (columns, stages), splits in product(
        ((16, 2), (32, 4), (64, 4), (128, 8)), ((128, 4), (256, 3)), (1, 2, 4)
    )
    if outs * columns * stages <= 98304
)
# Of groups of 32 columns or fewer, which a step takes at most.
NARROW_TILES = tuple(
    Tile(outs, 32, splits, warps, stages)
    for (outs, warps), stages, splits in product(
        ((16, 2), (32, 4), (64, 4), (128, 8)), (3, 5, 8), (1, 4)
    )
)
GROUP = 128
L2_BYTES = 200 << 20  # more than twice what an H100 or H200 has


@dataclass(frozen=True)
class Form:
    """make: weight bfloat16 [N, K] -> what multiply takes. bits: of a weight. tiled: the kernel
    with a tile, where it has some. tiles: to try."""

    make: Callable[[Tensor], Any]
    multiply: Callable[[Tensor, Any], Tensor]
    bits: float
    tiled: Callable[[Tensor, Any, Tile], Tensor] | None = None
    tiles: Sequence[Tile] = TILES


def by_block(weight: Tensor) -> Fp8Weight:
    blocks = weight.float().view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(FP8).view(weight.shape)
    return Fp8Weight(codes, scale, 128, 128, Fp8Input(group=128))


def four_bits(weight: Tensor, has_zero: bool) -> IntWeight:
    return whole_numbers(weight, 4, GROUP, torch.uint8 if has_zero else None)


def whole_numbers(
    weight: Tensor, bits: int, group: int, zero: torch.dtype | None = None
) -> IntWeight:
    """Rounded in groups of columns. zero: the middle of the range, in this type; of float32 0.25
    above it, as GGUF's zeros are no whole numbers, with scales in float32."""
    middle = 1 << (bits - 1)
    groups = weight.float().view(len(weight), -1, group)
    scale = groups.abs().amax(2) / (middle - 0.5)
    scale = scale if zero == torch.float32 else scale.to(torch.float16)
    shift = 0.25 if zero == torch.float32 else 0.0
    codes = (groups / scale.float()[:, :, None] + middle + shift).round().clamp(0, 2 * middle - 1)
    zeros = None if zero is None else torch.full_like(scale, middle + shift, dtype=zero)
    packed = codes.to(torch.uint8).view(weight.shape)
    return IntWeight.pack(packed, scale, zeros, bits)


def scaled_mm(x: Tensor, weight: Fp8Weight) -> Tensor:
    codes, scale = fp8_linear_triton.quantise_rows(x, Fp8Input())
    w_scale = weight.scale.view(1, -1)
    return torch._scaled_mm(codes, weight.codes.t(), scale, w_scale, out_dtype=x.dtype)


def fp8_tiled(x: Tensor, weight: Fp8Weight, tile: Tile) -> Tensor:
    return fp8_linear_triton.fp8_linear(x, weight, None, tile)


def int_tiled(x: Tensor, weight: IntWeight, tile: Tile) -> Tensor:
    return int_linear_triton.int_linear(x, weight, None, tile)


FORMS: dict[str, Form] = {
    "bf16 matmul": Form(lambda w: w, lambda x, w: x @ w.T, 16),
    "fp8 scaled_mm": Form(Fp8Weight.of, scaled_mm, 8),
    "fp8 w8a8": Form(Fp8Weight.of, fp8_linear, 8),
    "fp8 w8a16": Form(lambda w: replace(Fp8Weight.of(w), input=None), fp8_linear, 8, fp8_tiled),
    "fp8 blocks": Form(by_block, fp8_linear, 8),
    "int4": Form(lambda w: four_bits(w, False), int_linear, 4.125, int_tiled),
    "int4 zeros": Form(lambda w: four_bits(w, True), int_linear, 4.19, int_tiled),
    # Blocks of GGUF, as layers/quantization/gguf.py keeps them.
    "q4_0": Form(lambda w: whole_numbers(w, 4, 32), int_linear, 4.5, int_tiled, NARROW_TILES),
    "q4_k": Form(
        lambda w: whole_numbers(w, 4, 32, torch.float32), int_linear, 6, int_tiled, NARROW_TILES
    ),
    "q8_0": Form(lambda w: whole_numbers(w, 8, 32), int_linear, 8.5, int_tiled, NARROW_TILES),
}


def draw(rows: int, columns: int, deviation: float = 1.0) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * deviation


def expected(x: Tensor, weight: Any) -> Tensor:
    """In float64, of the rounded input and the codes."""
    rows = x.double()
    if isinstance(weight, Fp8Weight) and weight.input is not None:
        codes, scale = fp8_linear_triton.quantise_rows(x, weight.input)
        groups = codes.double().view(len(x), scale.shape[1], -1)
        rows = (groups * scale.double()[:, :, None]).view(x.shape)
    dense = weight if isinstance(weight, Tensor) else weight.dequantised()
    return rows @ dense.double().T


def check(weights: dict[str, Any]) -> list[dict[str, Any]]:
    """Largest error of each form beside the largest value, and whether a row alone is itself."""
    found = []
    for name, weight in weights.items():
        form = FORMS[name]
        x = draw(256, SHAPES["o"][1])
        truth = expected(x, weight)
        for rows in (1, 5, 16, 64, 256):
            out = form.multiply(x[:rows], weight)
            error = float((out.double() - truth[:rows]).abs().max() / truth[:rows].abs().max())
            alone = torch.stack([form.multiply(x[i : i + 1], weight)[0] for i in (0, rows - 1)])
            same = torch.equal(alone, out[[0, rows - 1]])
            found.append({"form": name, "rows": rows, "error": error, "row alone equal": same})
    return found


def check_tiles(weights: dict[str, Any]) -> list[str]:
    """Tiles whose products are wrong."""
    wrong, x = [], draw(37, SHAPES["o"][1])
    for name, weight in weights.items():
        form = FORMS[name]
        if form.tiled is not None:
            truth = expected(x, weight)
            for tile in form.tiles:
                error = (form.tiled(x, weight, tile).double() - truth).abs().max()
                if float(error / truth.abs().max()) > 0.01:
                    wrong.append(f"{name} {tile}: {float(error)}")
    return wrong


def _tiled(form: Form, x: Tensor, tile: Tile, weight: Any) -> Tensor:
    assert form.tiled is not None
    return form.tiled(x, weight, tile)


def graph_us(call: Callable[[Any], Tensor], weights: Sequence[Any]) -> float:
    """Microseconds a call: the median of replays."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(weights))
    return sorted(times)[len(times) // 2]


def copies_of(make: Callable[[Tensor], Any], weight: Tensor, bits: float) -> list[Any]:
    """What `make` makes of the weight, as often as exceeds the L2 cache."""
    count = max(2, math.ceil(L2_BYTES / (weight.numel() * bits / 8)))
    made = make(weight)
    return [made, *(_copy(made) for _ in range(min(count, 24) - 1))]


def _copy(made: Any) -> Any:
    if isinstance(made, Tensor):
        return made.clone()
    held = {name: value for name, value in vars(made).items() if isinstance(value, Tensor)}
    return replace(made, **{name: value.clone() for name, value in held.items()})


def time_shape(
    shape: str, weight: Tensor, sweeps: bool, forms: dict[str, Form]
) -> tuple[list[Any], list[Any]]:
    rows_us, swept = [], []
    for name, form in forms.items():
        held = copies_of(form.make, weight, form.bits)
        read = weight.numel() * form.bits / 8
        for rows in ROWS:
            x = draw(rows, weight.shape[1])
            us = graph_us(partial(form.multiply, x), held)
            rows_us.append(
                {"shape": shape, "form": name, "rows": rows, "us": us, "TB/s": read / us / 1e6}
            )
        for rows in SWEPT_ROWS if sweeps and form.tiled is not None else ():
            x = draw(rows, weight.shape[1])
            for tile in form.tiles:
                us = graph_us(partial(_tiled, form, x, tile), held)
                swept.append(
                    {"shape": shape, "form": name, "rows": rows, "tile": str(tile), "us": us}
                )
    return rows_us, swept


def compile_all(weight: Tensor, sweeps: bool, forms: dict[str, Form]) -> None:
    """On all cores, before anything is timed."""
    with precompile():
        for form in forms.values():
            made = form.make(weight)
            for rows in (1, 17, 33, 64, 128, 256):
                x = draw(rows, weight.shape[1])
                form.multiply(x, made)
                for tile in form.tiles if sweeps and form.tiled and rows <= 64 else ():
                    _tiled(form, x, tile, made)


def print_table(rows_us: Sequence[dict[str, Any]]) -> None:
    for shape in SHAPES:
        print(f"\n{shape} {list(SHAPES[shape])}, us a product (TB/s of weights)")
        print(f"{'form':>14}" + "".join(f"{rows:>14}" for rows in ROWS))
        for name in dict.fromkeys(one["form"] for one in rows_us):
            found = [one for one in rows_us if one["shape"] == shape and one["form"] == name]
            cells = (f"{one['us']:7.1f} ({one['TB/s']:4.2f})" for one in found)
            print(f"{name:>14}" + "".join(f"{cell:>14}" for cell in cells))


def print_best(swept: Sequence[dict[str, Any]]) -> None:
    keys = sorted({(one["shape"], one["form"], one["rows"]) for one in swept})
    for shape, form, rows in keys:
        found = [
            one for one in swept if (one["shape"], one["form"], one["rows"]) == (shape, form, rows)
        ]
        best = sorted(found, key=lambda one: one["us"])[:3]
        print(
            f"{shape:>8} {form:>10} {rows:>3}: "
            + "; ".join(f"{b['us']:.1f} {b['tile']}" for b in best)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--no-sweep", action="store_true", help="time the chosen tiles alone")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    torch.manual_seed(0)
    sweeps, forms = not args.no_sweep, {name: FORMS[name] for name in args.forms}
    weight = draw(*SHAPES["o"], SHAPES["o"][1] ** -0.5)
    compile_all(weight, sweeps, forms)
    weights = {name: form.make(weight) for name, form in forms.items()}
    checks = check(weights)
    for one in checks:
        print(one)
    wrong = check_tiles(weights) if sweeps else []
    print("wrong tiles:", wrong or "none")
    assert all(one["error"] < 0.01 for one in checks), "a kernel is wrong"
    rows_us, swept = [], []
    for shape, size in SHAPES.items():
        timed, tiles = time_shape(shape, draw(*size, size[1] ** -0.5), sweeps, forms)
        rows_us += timed
        swept += tiles
    print_table(rows_us)
    print_best(swept)
    if args.json is not None:
        facts = {"environment": environment(), "checks": checks, "wrong tiles": wrong}
        args.json.write_text(json.dumps(facts | {"forms": rows_us, "tiles": swept}, indent=1))


if __name__ == "__main__":
    main()
