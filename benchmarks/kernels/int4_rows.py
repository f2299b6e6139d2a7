"""Products with 4-bit weights for few rows on a GPU: the tiles of the CUDA kernel beside Triton's.

    python benchmarks/kernels/int4_rows.py [--json FILE] [--seconds N]

Each tile is first compared with a product in float64 of the same codes, and each row with itself
alone, bit for bit. A time is that of a captured graph over copies of the weight that exceed the L2
cache. Layers of an 8B and of a 1B, groups of 128.
"""

from __future__ import annotations

import argparse
import json
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

sys.path.insert(0, str(Path(__file__).parent))
from quantised import copies_of, draw, expected, four_bits, graph_us

from specengine.kernels.linear import dequantise_triton, int_linear_cuda, int_linear_triton
from specengine.kernels.linear.int_linear_cuda import FewTile, ManyTile
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

# Outputs and inputs.
SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "1B o": (2048, 2048),
    "1B down": (2048, 8192),
}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
# The order of a sum follows from the warps of the first, and from the ways of the second.
FEW = [
    *(
        FewTile(sixteens, warps, slots)
        for warps, (sixteens, slots) in product((8, 16), ((1, 4), (2, 2), (2, 3), (2, 4), (4, 2)))
    ),
    *(FewTile(2, warps, 2, ahead=True) for warps in (8, 16)),
]
MANY = [
    ManyTile(*outs, 8, blocks, 3) for outs, blocks in product(((2, 8), (2, 4), (1, 8)), (1, 4, 8))
]
FEWEST_OF_MANY = 8  # rows
Call = Callable[[Tensor, IntWeight], Tensor]


def tiled(x: Tensor, weight: IntWeight, tile: FewTile | ManyTile) -> Tensor:
    return int_linear_cuda.int_linear(x, weight, None, tile)


def triton(x: Tensor, weight: IntWeight) -> Tensor:
    return int_linear_triton.int_linear(x, weight, None)


def dequantised(x: Tensor, weight: IntWeight) -> Tensor:
    return F.linear(x, dequantise_triton.dequantise(weight, x.dtype))


def chosen(x: Tensor, weight: IntWeight) -> Tensor:
    return int_linear_cuda.int_linear(x, weight, None)


def forms() -> dict[str, Call]:
    cuda: dict[str, Call] = {str(tile): partial(tiled, tile=tile) for tile in (*FEW, *MANY)}
    return {"Triton": triton, "dequantised": dequantised, "chosen": chosen, **cuda}


def fits(name: str, rows: int) -> bool:
    """Whether a form is timed with so many rows."""
    if name == "dequantised":
        return rows >= 64
    return rows >= FEWEST_OF_MANY or not name.startswith("many")


def compile_all(weights: Sequence[IntWeight]) -> None:
    """On all cores, before anything is timed."""
    with precompile():
        for weight in weights:
            for rows in ROWS:
                for name, call in forms().items():
                    if fits(name, rows):
                        call(draw(rows, weight.shape[1]), weight)


def check(weight: IntWeight) -> list[dict[str, Any]]:
    """Largest error of each form beside the largest value, and whether a row alone is itself, and
    of many rows what it is among few."""
    found, most = [], max(ROWS)
    x = draw(most, weight.shape[1])
    truth = expected(x, weight)
    for name, call in forms().items():
        if name == "dequantised":
            continue
        for rows in (1, 7, 16, 37, most):
            out = call(x[:rows], weight)
            error = float((out.double() - truth[:rows]).abs().max() / truth[:rows].abs().max())
            alone = torch.stack([call(x[i : i + 1], weight)[0] for i in (0, rows - 1)])
            same = torch.equal(alone, out[[0, rows - 1]])
            if name.startswith("many"):
                same = same and torch.equal(out, tiled(x[:rows], weight, FewTile(2, 8, 2)))
            found.append({"form": name, "rows": rows, "error": error, "row alone equal": same})
    return found


def check_kinds() -> list[dict[str, Any]]:
    """Other types and groups with the tiles that are chosen: the largest errors."""
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
        for rows in (1, 9, 40):
            out = int_linear_cuda.int_linear(x[:rows], weight, None)
            error = float((out.double() - truth[:rows]).abs().max() / truth.abs().max())
            name = f"{dtype} {group} {scale_type} {has_zero}"
            found.append({"form": name, "rows": rows, "error": error, "row alone equal": True})
    return found


def time_shape(shape: str, until: float) -> list[dict[str, Any]]:
    weight = draw(*SHAPES[shape], SHAPES[shape][1] ** -0.5)
    held = copies_of(lambda one: four_bits(one, True), weight, 4.19)
    read = held[0].num_bytes
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        x = draw(rows, weight.shape[1])
        for name, call in forms().items():
            if time.monotonic() > until:
                return found
            if not fits(name, rows):
                continue
            us = graph_us(partial(call, x), held)
            found.append(
                {"shape": shape, "form": name, "rows": rows, "us": us, "TB/s": read / us / 1e6}
            )
    return found


def print_shape(shape: str, found: Sequence[dict[str, Any]]) -> None:
    print(f"\n{shape} {list(SHAPES[shape])}, us a product (TB/s of weights)")
    print(f"{'form':>34}" + "".join(f"{rows:>14}" for rows in ROWS))
    for name in forms():
        timed = {one["rows"]: one for one in found if one["form"] == name}
        cells = (
            f"{timed[rows]['us']:.1f} ({timed[rows]['TB/s']:.2f})" if rows in timed else ""
            for rows in ROWS
        )
        print(f"{name:>34}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop timing after so many")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    torch.manual_seed(0)
    made = four_bits(draw(*SHAPES["8B o"], SHAPES["8B o"][1] ** -0.5), True)
    assert made.zero is not None
    made = replace(made, zero=torch.randint_like(made.zero, 17))
    compile_all([made])
    print(f"compiled; {until - time.monotonic():.0f} s left", flush=True)
    checks = check(made) + check_kinds()
    wrong = defaultdict(list)
    for one in checks:
        if one["error"] > 0.01 or not one["row alone equal"]:
            wrong[one["form"]].append((one["rows"], one["error"], one["row alone equal"]))
    print("wrong:", dict(wrong) or "none")
    print("largest error", max(one["error"] for one in checks), flush=True)
    figures = []
    for shape in SHAPES:
        figures += (found := time_shape(shape, until))
        print_shape(shape, found)
    if args.json is not None:
        facts = {"environment": environment(), "checks": checks, "figures": figures}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
