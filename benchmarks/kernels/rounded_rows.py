"""Rows rounded to FP8 between the products of a layer: checked, then microseconds by kernel.

    python -m benchmarks.kernels.rounded_rows [--json FILE]

Codes, scales and rows of each form are compared with Triton's, bit for bit. Then a chain of a layer
of an 8B but attention (fp8_products.py) in a captured graph over the weights of several layers, the
products as the engine chooses them: with one kernel in place of Triton's, and with all of them.
Graphs are replayed in turns; the medians replace the table. Takes about half a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

from benchmarks.kernels.fp8_products import EPS, Layer, captured, in_turns, made
from benchmarks.kernels.quantised import SHAPES, draw
from specengine.kernels.linear import (
    activation_triton,
    fp8_linear_triton,
    norm_triton,
    rounded_cuda,
)
from specengine.kernels.linear.fp8_linear import fp8_linear
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import found_beside, put_beside
from specengine.kernels.linear.rounded_cuda import RowForm
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

TITLE = "Rows rounded to FP8 between the products of a layer"
ROWS = (1, 8, 64, 128, 2048)
LAYERS = 8
HIDDEN, INNER = SHAPES["down"]

Rounded = tuple[Tensor, Tensor]


def triton_norm(x: Tensor, stream: Tensor, gain: Tensor) -> Rounded:
    return norm_triton.fused_add_rms_norm(x, stream, gain, EPS, True)


def cuda_norm(x: Tensor, stream: Tensor, gain: Tensor) -> Rounded:
    return rounded_cuda.fused_add_rms_norm(x, stream, gain, EPS)


def triton_act(x: Tensor) -> Tensor:
    return activation_triton.act_and_mul(x, "silu", True)


def triton_quantise(x: Tensor) -> Rounded:
    return fp8_linear_triton.quantise_rows(x, Fp8Input())


@dataclass(frozen=True)
class Way:
    """Kernels between the products."""

    norm: Callable[[Tensor, Tensor, Tensor], Rounded] = triton_norm
    act: Callable[[Tensor], Tensor] = triton_act
    quantise: Callable[[Tensor], Rounded] = triton_quantise


ACTS = [RowForm(*form) for form in ((8, 7), (4, 14), (4, 7, 2), (2, 14, 2), (1, 28, 2), (1, 14, 4))]
QUANTISES = [RowForm(*form) for form in ((1, 16), (1, 8, 2), (2, 8), (4, 4))]


def ways() -> dict[str, Way]:
    """chosen: as the engine has them."""
    found = {
        "Triton": Way(),
        "chosen": Way(cuda_norm, rounded_cuda.silu_and_mul, rounded_cuda.quantise_rows),
        "norm": Way(norm=cuda_norm),
    }
    for form in ACTS:
        found[f"act {form}"] = Way(act=partial(rounded_cuda.silu_and_mul, form=form))
    for form in QUANTISES:
        found[f"quantise {form}"] = Way(quantise=partial(rounded_cuda.quantise_rows, form=form))
    return found


def layer_chain(
    way: Way, hidden: Tensor, stream: Tensor, gain: Tensor, layers: Sequence[Layer]
) -> Tensor:
    """All of the layers but attention, in whose place a norm of the queries stands."""
    for layer in layers:
        normed, stream = way.norm(hidden, stream, gain)
        heads = fp8_linear(normed, layer["qkv"])[:, :HIDDEN]
        heads = norm_triton.rms_norm(heads, gain, EPS)
        hidden = fp8_linear(put_beside(heads, *way.quantise(heads)), layer["o"])
        normed, stream = way.norm(hidden, stream, gain)
        inner = way.act(fp8_linear(normed, layer["gate_up"]))
        hidden = fp8_linear(inner, layer["down"])
    return hidden


def parts_of(way: Way, x: Tensor, stream: Tensor, gain: Tensor, wide: Tensor) -> list[Tensor]:
    """Bytes of all that its kernels write."""
    normed, total = way.norm(x, stream, gain)
    inner = way.act(wide)
    found = [normed, total, inner, *way.quantise(x)]
    for one in (normed, inner):
        kept = found_beside(one, Fp8Input())
        assert kept is not None
        found += kept
    return [one.view(torch.uint8) for one in found]


def check(name: str, way: Way) -> dict[str, Any]:
    """How many values are not Triton's."""
    wrong = [0] * 9
    for rows, deviation in ((1, 1.0), (5, 300.0), (8, 1e-4), (64, 5.0), (131, 1.0)):
        x, stream, gain = draw(rows, HIDDEN, deviation), draw(rows, HIDDEN, 30), draw(1, HIDDEN)[0]
        wide = draw(rows, 2 * INNER, 5 * deviation)
        x[-1, 7:] *= 0  # nearly empty
        if rows > 1:
            wide[0] *= 0
            wide[1, 5], wide[1, 9] = 1e30, -100.0
        given = x, stream, gain, wide
        pairs = zip(parts_of(way, *given), parts_of(Way(), *given), strict=True)
        for i, (found, expected) in enumerate(pairs):
            wrong[i] += int((found != expected).sum())
    return {"way": name, "other bytes": wrong}


def compile_all(layers: Sequence[Layer], all_ways: dict[str, Way]) -> None:
    gain = draw(1, HIDDEN)[0]
    with precompile():
        for rows in ROWS:
            x = draw(rows, HIDDEN)
            for way in all_ways.values():
                layer_chain(way, x, x, gain, layers[:1])


def table(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a way."""
    names = [name for name in layers[0] if name != "rows"]
    return [{"kernels": name} | {str(one["rows"]): one[name] for one in layers} for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    all_ways = ways()
    layers = [{name: made(size) for name, size in SHAPES.items()} for _ in range(LAYERS)]
    compile_all(layers, all_ways)
    checks = [check(name, way) for name, way in all_ways.items()]
    for one in checks:
        if any(one["other bytes"]):
            print("OTHER BITS:", one)
    print(sum(not any(one["other bytes"]) for one in checks), "of", len(checks), "ways are equal")
    gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = []
    for rows in ROWS:
        given = draw(rows, HIDDEN), draw(rows, HIDDEN), gain
        graphs = {
            name: captured(partial(layer_chain, way, *given), [layers])
            for name, way in all_ways.items()
        }
        us = in_turns(graphs, LAYERS)
        print(f"layer without attention, {rows} rows, us:")
        for name, one in us.items():
            print(f"  {one:8.2f} {one - us['Triton']:+6.2f}  {name}")
        found.append({"rows": rows, **us})
    if args.json is not None:
        facts = {"environment": environment(), "checks": checks, "layers": found}
        args.json.write_text(json.dumps(facts, indent=1))
    if all(not any(one["other bytes"]) for one in checks):
        print(report.write("kernels", "rounded-rows", TITLE, table(found)))


if __name__ == "__main__":
    main()
