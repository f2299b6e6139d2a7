"""Compiles the products with FP8 and 4-bit weights for Hopper, and prints their names. Fails where
one writes over what a running product still reads. Argument: rows of the input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.linear import fp8_codes_triton, fp8_linear_triton, int_linear_triton
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight, IntWeight
from tests.kernels import offline_triton, wgmma_waits


def main(rows: int) -> None:
    offline_triton.use()
    compiled: list[str] = []
    launch = JITFunction.run

    def run(kernel: object, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(made.metadata.name)
        has_wgmma = "wgmma" in made.asm["ptx"]
        wrong = wgmma_waits.overwritten(made.asm["cubin"]) if has_wgmma else []
        assert not wrong, f"{compiled[-1]} {kwargs}: {wrong[:4]}"
        return made

    JITFunction.run = run
    for module in (fp8_codes_triton, fp8_linear_triton, int_linear_triton):
        module.has_dependent_launch = lambda x: True  # type: ignore[attr-defined]
    fp8 = Fp8Weight.of(torch.ones(6144, 256))
    four = IntWeight(
        torch.zeros(6144, 128, dtype=torch.uint8), torch.ones(6144, 2).half(), None, 4, 128
    )
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    fp8_linear_triton.fp8_linear(x, replace(fp8, input=None), None)
    fp8_linear_triton.fp8_linear(x, fp8, None)
    codes = torch.zeros(1024, 2048).to(FP8)  # prefetched, in several parts of the columns
    blocks = Fp8Weight(codes, torch.ones(8, 16), 128, 128, Fp8Input(group=128))
    scales, of_blocks = torch.ones(rows, 1), torch.ones(rows, 16)
    fp8_codes_triton.fp8_linear(codes[:rows], scales, Fp8Weight.of(codes), None, x.dtype)
    fp8_codes_triton.fp8_linear(codes[:rows], of_blocks, blocks, None, x.dtype)
    parts = torch.empty(4, rows, 1024)
    for weight in (blocks, blocks.by_row()):
        fp8_codes_triton.fp8_linear(codes[:rows], of_blocks, weight, None, x.dtype, parts=parts)
    int_linear_triton.int_linear(x, four, None)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main(int(sys.argv[1]))
