"""The gated activation behind a product with a 4-bit weight on a GPU: one kernel beside two.

    python -m benchmarks.kernels.int4_gated [--json FILE]

Bits are compared first, of both kernels and both forms of their weights. Then, at the layers of an
8B, of a 1B and of what one of four ranks has of a 70B: gate and up with the activation, apart and
as one, with the norm before them and the down projection behind them, as in a layer: each fetches
its weight, and takes its place on the multiprocessors, while the kernels ahead run. By themselves
they follow their like, whose blocks take places that the next one's then lack. Captured graphs over
copies of the weights that exceed the L2 cache, replayed by turns; medians are told. Takes under a
minute on an H200 and replaces its table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

from benchmarks.kernels.int4_rows import ROWS, captured, in_turns
from benchmarks.kernels.quantised import copies_of, draw, four_bits
from specengine.kernels.linear import int_linear_cuda
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.int4_tiles import FewTile, Tile, WideTile, few_tile, wide_tile
from specengine.kernels.linear.int_linear import gated_int_linear, int_linear
from specengine.kernels.linear.norm import fused_add_rms_norm
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

# Hidden and intermediate features.
LAYERS = {"8B": (4096, 14336), "1B": (2048, 8192), "70B, one of 4": (8192, 7168)}
BOTH_KERNELS = (1, 4, 8, 16)  # rows near which another kernel is chosen
TITLE = "Gate, up and activation with 4-bit weights"
Pair = tuple[IntWeight, IntWeight]  # gate and up, down
Inner = Callable[[Tensor, IntWeight], Tensor]


def apart(x: Tensor, weight: IntWeight) -> Tensor:
    return act_and_mul(int_linear(x, weight), "silu")


def as_one(x: Tensor, weight: IntWeight) -> Tensor:
    return gated_int_linear(x, weight, "silu")


def by_kernel(x: Tensor, weight: IntWeight, kernel: type[Tile], gated: bool) -> Tensor:
    """With the kernel for few rows, or that for dozens."""
    rows = len(x)
    tile = few_tile(*weight.shape, rows) if kernel is FewTile else wide_tile(weight, rows)
    out = int_linear_cuda.int_linear(x, weight, None, tile, gated=gated)
    return out if gated else act_and_mul(out, "silu")


def inner_forms(rows: int) -> dict[str, Inner]:
    found: dict[str, Inner] = {"apart": apart, "as one": as_one}
    if rows in BOTH_KERNELS:
        for name, gated in (("apart", False), ("as one", True)):
            found[f"few, {name}"] = partial(by_kernel, kernel=FewTile, gated=gated)
            found[f"wide, {name}"] = partial(by_kernel, kernel=WideTile, gated=gated)
    return found


def in_layer(x: Tensor, pair: Pair, inner: Inner) -> Tensor:
    normed, _ = fused_add_rms_norm(x, x, x[0], 1e-5)
    return int_linear(inner(normed, pair[0]), pair[1])


def alone(x: Tensor, pair: Pair, inner: Inner) -> Tensor:
    return inner(x, pair[0])


def forms(rows: int) -> dict[str, Callable[[Tensor, Pair], Tensor]]:
    found: dict[str, Callable[[Tensor, Pair], Tensor]] = {}
    for name, inner in inner_forms(rows).items():
        found[name] = partial(in_layer, inner=inner)
    for name in ("apart", "as one"):
        found[f"{name}, alone"] = partial(alone, inner=inner_forms(rows)[name])
    return found


def drawn(outs: int, columns: int) -> Tensor:
    return draw(outs, columns, columns**-0.5 * 3)  # gates of some -10 to 10


def check(layer: str) -> int:
    """In how many places the two differ, which is none."""
    hidden, intermediate = LAYERS[layer]
    weight, wrong = four_bits(drawn(2 * intermediate, hidden), True), 0
    for rows, dtype in product((*ROWS, 6, 7, 37), (torch.bfloat16, torch.float16)):
        x = draw(rows, hidden).to(dtype)
        for name, inner in inner_forms(rows).items():
            if "as one" in name:
                other = inner_forms(rows)[name.replace("as one", "apart")]
                places = int((inner(x, weight) != other(x, weight)).sum())
                wrong += places
                if places:
                    print(f"{layer}, {rows} rows of {dtype}, {name}: {places} places differ")
    return wrong


def compile_all() -> None:
    """On all cores, before anything is timed."""
    with precompile():
        for hidden, intermediate in LAYERS.values():
            gate_up = four_bits(drawn(2 * intermediate, hidden), True)
            pair = gate_up, four_bits(drawn(hidden, intermediate), True)
            for rows in ROWS:
                x = draw(rows, hidden)
                for call in forms(rows).values():
                    call(x, pair)
                for inner in inner_forms(rows).values():
                    inner(x.half(), gate_up)


def time_layer(layer: str) -> list[dict[str, Any]]:
    hidden, intermediate = LAYERS[layer]
    held = list(
        zip(
            copies_of(partial(four_bits, has_zero=True), drawn(2 * intermediate, hidden), 4.19),
            copies_of(partial(four_bits, has_zero=True), drawn(hidden, intermediate), 4.19),
            strict=False,
        )
    )
    found = []
    for rows in ROWS:
        x = draw(rows, hidden)
        graphs = {n: captured(partial(call, x), held) for n, call in forms(rows).items()}
        times = in_turns(graphs, len(held))
        us = {name: statistics.median(all_) for name, all_ in times.items()}
        found.append({"layer": layer, "rows": rows, **us})
        told = "  ".join(f"{name} {one:.2f}" for name, one in us.items())
        print(f"{layer:>14} {rows:>4} rows, us: {told}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    compile_all()
    wrong = {layer: check(layer) for layer in LAYERS}
    print("places that differ", wrong, flush=True)
    figures = [one for layer in LAYERS for one in time_layer(layer)]
    if args.json is not None:
        facts = {"environment": environment(), "differ": wrong, "figures": figures}
        args.json.write_text(json.dumps(facts, indent=1))
    columns = ("layer", "rows", *forms(2))
    rows = [{name: one[name] for name in columns} for one in figures]
    print(report.write("kernels", "int4-gated", TITLE, rows))


if __name__ == "__main__":
    main()
