"""FP8 products in blocks of 128 of Qwen3-Next's layers, each behind a norm that rounds its rows.

    python -m benchmarks.kernels.hybrid_products [--json FILE]

Microseconds of the norm and the product, by tile, with and without the weight being prefetched
into the L2 cache before the product waits for the norm; weights are from memory. All tiles of as
many splits must give the same bits, and a row alone those of the same row beside others. Splits
decide the order of a row's sum: they must be the same for all numbers of rows, so
that the best of each number of splits are told for all rows together. "norm": it alone; "bytes":
the weight at the speed of a copy. Then the product of the gates (bfloat16, 64 outputs) by cuBLAS
and by the kernel for few rows. Takes about 50 s on an H200.
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
from torch.nn import functional as F

from benchmarks.kernels.delta_forms import captured
from benchmarks.kernels.experts import copy_speed
from benchmarks.kernels.fp8_products import in_turns
from benchmarks.kernels.quantised import L2_BYTES, draw
from specengine.kernels.linear import few_row, fp8_codes_triton, norm_triton
from specengine.kernels.linear.fp8_linear import fp8_linear, quantise_rows
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.kernels.linear.split_sum_triton import Tile
from specengine.kernels.precompile import precompile

# Outputs and inputs.
SHAPES = {
    "delta q, k, v, z": (12288, 2048),
    "attention q, k, v": (9216, 2048),
    "out": (2048, 4096),
    "shared gate, up": (1024, 2048),
    "shared down": (2048, 512),
}
GATES = (64, 2048)
ROWS = (1, 8, 64)
BLOCK, EPS, MOST_COPIES = 128, 1e-6, 128
PROGRAMS = ((64, 4), (128, 4))  # outputs and warps
STAGES, SPLITS = (4, 6), (1, 2, 4, 8)


def choices(columns: int) -> list[Tile]:
    return [
        Tile(outs, BLOCK, splits, warps, stages, prefetches=prefetches)
        for (outs, warps), splits, stages, prefetches in product(
            PROGRAMS, SPLITS, STAGES, (False, True)
        )
        if splits * BLOCK <= columns
    ]


def made(shape: tuple[int, int]) -> Fp8Weight:
    codes = (draw(*shape) * 32).to(FP8)
    scale = torch.rand(-(-shape[0] // BLOCK), shape[1] // BLOCK, device="cuda") / 512
    return Fp8Weight(codes, scale, BLOCK, BLOCK, Fp8Input(group=BLOCK))


def normed(x: Tensor, stream: Tensor, gain: Tensor) -> Tensor:
    return norm_triton.fused_add_rms_norm(x, stream, gain, EPS, BLOCK)[0]


def multiply(x: Tensor, weight: Fp8Weight, tile: Tile | None) -> Tensor:
    """tile: None for the one in force."""
    if tile is None:
        return fp8_linear(x, weight)
    assert weight.input is not None
    rounded = quantise_rows(x, weight.input)
    return fp8_codes_triton.fp8_linear(*rounded, weight, None, x.dtype, tile)


def check(size: tuple[int, int], given: Sequence[Tile]) -> list[str]:
    """Tiles with a wrong sum, with other bits, or whose rows depend on others."""
    x, stream, gain = draw(64, size[1]), draw(64, size[1]), draw(1, size[1])[0]
    weight, wrong, by_splits = made(size), list[str](), dict[int, Tensor]()
    truth = normed(x, stream, gain).double() @ weight.dequantised().double().T
    for tile in given:
        out = multiply(normed(x, stream, gain), weight, tile)
        error = float((out.double() - truth).norm() / truth.norm())
        alone = multiply(normed(x[5:6], stream[5:6], gain), weight, tile)
        same = torch.equal(by_splits.setdefault(tile.splits, out), out)
        if error > 0.05 or not same or not torch.equal(alone[0], out[5]):
            wrong.append(f"{tile}: error {error:.3g}, bits of others {same}")
    return wrong


def of_copies(call: Callable[[Any], object], weights: Sequence[Any]) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for weight in weights:
            call(weight)

    return captured(run)


def time_shape(name: str, size: tuple[int, int], speed: float) -> list[dict[str, Any]]:
    copies = min(MOST_COPIES, -(-L2_BYTES // (size[0] * size[1])))
    weights, gain, found = [made(size) for _ in range(copies)], draw(1, size[1])[0], []
    for rows in ROWS:
        x, stream = draw(rows, size[1]), draw(rows, size[1])

        def call(
            weight: Fp8Weight, tile: Tile | None, x: Tensor = x, stream: Tensor = stream
        ) -> None:
            multiply(normed(x, stream, gain), weight, tile)

        def norm(_: Fp8Weight, x: Tensor = x, stream: Tensor = stream) -> None:
            normed(x, stream, gain)

        graphs = {"norm": of_copies(norm, weights)}
        graphs["in force"] = of_copies(partial(call, tile=None), weights)
        for tile in choices(size[1]):
            graphs[_name(tile)] = of_copies(partial(call, tile=tile), weights)
        found.append({"shape": name, "rows": rows, "us": in_turns(graphs, copies)})
    told = size[0] * size[1] / speed * 1e6
    for one in found:
        us = one["us"]
        print(
            f"\n{name} {size}, {one['rows']} rows: bytes {told:.1f}, norm {us['norm']:.1f}, ",
            end="",
        )
        print(f"in force {us['in force']:.1f}", end="")
        for way, took in sorted(us.items(), key=lambda pair: pair[1])[1:5]:
            print(f"; {took:.1f} {way}", end="")
    print(f"\n{name}: by splits, rows {ROWS} with the best tile of each")
    for splits, fetched in product(SPLITS, (False, True)):
        tiles = [one for one in choices(size[1]) if one.splits == splits]
        names = [_name(one) for one in tiles if one.prefetches == fetched]
        if names:
            best = [min((one["us"][way], way) for way in names) for one in found]
            print(
                f"  {splits} splits, prefetch {fetched}:", *(f"{us:.1f} {way}" for us, way in best)
            )
    return found


def _name(tile: Tile) -> str:
    form = f"{tile.outs}x{tile.warps} s{tile.splits} st{tile.stages}"
    return f"{form} prefetched" if tile.prefetches else form


def time_gates() -> list[dict[str, Any]]:
    """The product behind that of q, k, v and z, of the same rows."""
    found = []
    both = [(made(SHAPES["delta q, k, v, z"]), draw(*GATES, 0.02)) for _ in range(10)]
    gain = draw(1, GATES[1])[0]
    for rows in ROWS:
        x, stream = draw(rows, GATES[1]), draw(rows, GATES[1])
        ways: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
            "without": None,
            "cuBLAS": F.linear,
            "few rows": few_row.linear,
        }

        def run(
            pair: tuple[Fp8Weight, Tensor],
            gates: Callable[[Tensor, Tensor], Tensor] | None,
            x: Tensor = x,
            stream: Tensor = stream,
        ) -> None:
            rounded = normed(x, stream, gain)
            multiply(rounded, pair[0], None)
            if gates is not None:
                gates(rounded, pair[1])

        graphs = {name: of_copies(partial(run, gates=way), both) for name, way in ways.items()}
        found.append({"gates": GATES, "rows": rows, "us": in_turns(graphs, len(both))})
        print("norm, q k v z and the gates:", found[-1], flush=True)
    return found


def compile_all() -> None:
    with precompile():
        for rows, (name, size) in product((1, 64), SHAPES.items()):
            x, weight = draw(rows, size[1]), made(size)
            for tile in (None, *choices(size[1])) if name == "out" else (None,):
                multiply(normed(x, x, x[0]), weight, tile)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    compile_all()
    wrong = check(SHAPES["out"], choices(SHAPES["out"][1]))
    print("wrong tiles:", wrong or "none", flush=True)
    found, speed = time_gates(), copy_speed()
    for name, size in SHAPES.items():
        found += time_shape(name, size, speed)
    if args.json is not None:
        facts = {"card": torch.cuda.get_device_name(), "wrong": wrong, "us": found}
        args.json.write_text(json.dumps(facts, indent=1))
    raise SystemExit(int(bool(wrong)))


if __name__ == "__main__":
    main()
