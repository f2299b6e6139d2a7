"""The kernels of experts, compiled for Hopper as a GPU of that kind launches them; for a process of
its own. Prints bytes of shared memory by kernel, the most that any form takes."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.experts import experts_triton, order_triton, route_triton
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights, Router, Routing
from tests.kernels import offline_triton

HIDDEN, INNER, COUNT, CHOSEN = 256, 128, 8, 2
MANY = (160, 256, 384, 512)  # experts of published models; 512 are Qwen3-Next's


def main(num_rows: list[int]) -> None:
    offline_triton.use()
    launch, shared = JITFunction.run, dict[str, int]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        name = kernel.__name__
        shared[name] = max(shared.get(name, 0), made.metadata.shared)
        return made

    JITFunction.run = compile_only
    for module in (experts_triton, order_triton, route_triton):
        module.has_dependent_launch = lambda _: True
    for dtype in (torch.bfloat16, torch.float32):
        weights = ExpertWeights(
            torch.zeros(COUNT, 2 * INNER, HIDDEN, dtype=dtype),
            torch.zeros(COUNT, HIDDEN, INNER, dtype=dtype),
        )
        clamped = ExpertWeights(
            weights.gate_up,
            weights.down,
            torch.zeros(COUNT, 2 * INNER, dtype=dtype),
            torch.zeros(COUNT, HIDDEN, dtype=dtype),
            Activation("clamped"),
        )
        for rows in num_rows:
            x = torch.zeros(rows, HIDDEN, dtype=dtype)
            chosen = Chosen(torch.zeros(rows, CHOSEN, dtype=torch.int32), torch.zeros(rows, CHOSEN))
            experts_triton.experts(x, chosen, weights)
        experts_triton.experts(x, chosen, clamped)
        router = Router(torch.zeros(COUNT, HIDDEN, dtype=dtype))
        grouped = Routing(CHOSEN, "sigmoid", num_groups=4, num_chosen_groups=2)
        route_triton.route(x, router, Routing(CHOSEN))
        route_triton.route(x, router, grouped)
    for count in MANY:
        for rows in (70, 700):
            order_triton.order(torch.zeros(rows, 10, dtype=torch.int32), count, 16)
        for dtype in (torch.bfloat16, torch.float32):
            router = Router(torch.zeros(count, HIDDEN, dtype=dtype))
            route_triton.route(torch.zeros(2, HIDDEN, dtype=dtype), router, Routing(10))
    print(json.dumps(shared))


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
