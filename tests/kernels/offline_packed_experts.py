"""The kernels of experts in 8 and 4 bits, compiled for Hopper as a GPU of that kind launches them;
for a process of its own. Prints bytes of shared memory by kernel, the most that any form takes.
Fails where a kernel writes over what a running product still reads."""

from __future__ import annotations

import json
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.experts import (
    experts_triton,
    order_triton,
    packed_triton,
    widened_triton,
)
from specengine.kernels.experts.formats import fp8, int_codes, mxfp4
from specengine.kernels.experts.packed import ExpertFormat, PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import Activation, Chosen
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight
from tests.kernels import offline_triton, wgmma_waits

HIDDEN, INNER, COUNT, CHOSEN = 512, 256, 8, 2
FORMS = (
    *("fp8 blocks", "fp8 rows", "fp8 rows as they are", "fp8 as they are"),
    *("int4", "int4 zeros", "int8", "mxfp4"),
    *("gguf q4_k", "gguf q5_k", "gguf q6_k"),
)


def one(form: str, rows: int, columns: int) -> tuple[ExpertFormat, Any]:
    if form.startswith("fp8"):
        codes = torch.zeros(rows, columns).to(FP8)
        if form.startswith("fp8 rows"):
            given = Fp8Input() if form == "fp8 rows" else None
            return fp8.FORMAT, Fp8Weight(codes, torch.ones(rows, 1), 1, columns, given)
        scale = torch.ones(rows // 128, columns // 128)
        given = None if form == "fp8 as they are" else Fp8Input(group=128)
        return fp8.FORMAT, Fp8Weight(codes, scale, 128, 128, given)
    if form == "mxfp4":
        blocks = torch.zeros(rows, columns // 32, 16, dtype=torch.uint8)
        return mxfp4.FORMAT, Mxfp4Weight.of(blocks, blocks[:, :, 0])
    if form.startswith("gguf"):
        scale = torch.ones(rows, columns // (16 if form.endswith("q6_k") else 32))
        zero = None if form.endswith("q6_k") else scale.clone()
        codes = torch.zeros(rows, columns, dtype=torch.uint8)
        weight = IntWeight.pack(codes, scale, zero, 4 if form.endswith("q4_k") else 8)
        return int_codes.FORMAT, weight
    scale = torch.ones(rows, columns // 128, dtype=torch.float16)
    zero = torch.zeros_like(scale, dtype=torch.uint8) if form == "int4 zeros" else None
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    return int_codes.FORMAT, IntWeight.pack(codes, scale, zero, 8 if form == "int8" else 4)


def stacked(form: str, rows: int, columns: int) -> PackedExperts:
    format, weight = one(form, rows, columns)
    made = PackedExperts.of(format, COUNT, (weight for _ in range(COUNT)))
    assert made is not None
    return made


def main(num_rows: list[int]) -> None:
    offline_triton.use()
    launch, shared = JITFunction.run, dict[str, int]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        name = kernel.__name__
        shared[name] = max(shared.get(name, 0), made.metadata.shared)
        has_products = "wgmma" in made.asm["ptx"]
        wrong = wgmma_waits.overwritten(made.asm["cubin"]) if has_products else []
        assert not wrong, f"{name} {kwargs}: {wrong[:4]}"
        return made

    JITFunction.run = compile_only
    for module in (experts_triton, order_triton, packed_triton):
        module.has_dependent_launch = lambda _: True
    for in_pairs, form in product((False, True), FORMS):
        int_codes.IN_PAIRS = in_pairs
        both = stacked(form, 2 * INNER, HIDDEN), stacked(form, HIDDEN, INNER)
        weights = PackedExpertWeights(*both)
        if form == "mxfp4":
            bias = torch.zeros(COUNT, 2 * INNER), torch.zeros(COUNT, HIDDEN)
            weights = PackedExpertWeights(*both, *bias, Activation("clamped"))
        for rows in num_rows:
            x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
            ids = torch.zeros(rows, CHOSEN, dtype=torch.int32)
            experts_triton.experts(x, Chosen(ids, torch.zeros(rows, CHOSEN)), weights)
        if form == "mxfp4":
            widen(weights, x, ids)
    print(json.dumps(shared))


def widen(weights: PackedExpertWeights, x: torch.Tensor, ids: torch.Tensor) -> None:
    """What long prompts take. The slots' order and products are not computed here."""
    slots = torch.zeros(ids.numel(), dtype=torch.int32)
    order = order_triton.Order(slots, slots, torch.zeros(COUNT, dtype=torch.int32))
    widened_triton.order_triton = SimpleNamespace(order=lambda *_: order)  # type: ignore[assignment]
    widened_triton.F = SimpleNamespace(  # type: ignore[assignment]
        grouped_mm=lambda one, other, offs: one.new_empty(len(one), other.shape[2])
    )
    mxfp4.IN_PAIRS = True
    parts = torch.empty(CHOSEN, *x.shape, dtype=x.dtype)
    widened_triton.run(x, Chosen(ids, torch.zeros(ids.shape)), weights, parts)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
