"""Compiles norms and the product with 4-bit weights in Triton for Hopper. Prints of each its name,
whether the norm's rows are awaited, and in which order it waits for the kernel ahead and lets the
next one start."""

from __future__ import annotations

import json
import re

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.linear import int_linear_triton, norm_triton
from specengine.kernels.linear.quantised import IntWeight
from tests.kernels import offline_triton

_STEP = re.compile(r"griddepcontrol\.(wait|launch_dependents)\b")


def main() -> None:
    offline_triton.use()
    found: list[tuple[str, bool, list[str]]] = []
    launch = JITFunction.run

    def run(kernel: object, *args: object, grid: object, warmup: bool, **given: object) -> object:
        made = launch(kernel, *args, grid=grid, warmup=True, **given)
        awaited = bool(given.get("EARLY", False))
        found.append((made.metadata.name, awaited, _STEP.findall(made.asm["ptx"])))
        return made

    JITFunction.run = run
    for module in (int_linear_triton, norm_triton):
        module.has_dependent_launch = lambda x: True  # type: ignore[attr-defined]
    x, gain = torch.zeros(2, 256).bfloat16(), torch.ones(256).bfloat16()
    for awaited in (False, True):
        norm_triton.rms_norm(x, gain, 1e-5, awaited=awaited)
        norm_triton.fused_add_rms_norm(x, x, gain, 1e-5, awaited=awaited)
    codes, scale = torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2).half()
    int_linear_triton.int_linear(x, IntWeight(codes, scale, None, 4, 128), None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
