"""The kernels of the gated delta rule, compiled for Hopper as a GPU of that kind launches them; for
a process of its own. Prints bytes of shared memory by kernel, the most that any form takes.
Fails where a kernel writes over what a running product still reads."""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.delta import (
    delta_chunks_triton,
    delta_decode_triton,
    delta_prompt_triton,
    delta_rule_triton,
)
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    NodeBatch,
    PromptBatch,
    Save,
    StatePaths,
)
from specengine.memory.state_pool import StatePool, StateShape, StateSizes
from tests.kernels import offline_triton, wgmma_waits

QWEN3_NEXT = DeltaShape(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
SMALL = DeltaShape(num_key_heads=2, num_heads=4, key_dim=16, value_dim=32, conv_width=4)


def main() -> None:
    offline_triton.use()
    launch, shared = JITFunction.run, dict[str, int]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        name = kernel.__name__
        shared[name] = max(shared.get(name, 0), made.metadata.shared)
        wrong = wgmma_waits.overwritten(made.asm["cubin"])
        assert not wrong, f"{name} {kwargs}: {wrong[:4]}"
        return made

    JITFunction.run = compile_only
    for shape, dtype in ((SMALL, torch.float32), (QWEN3_NEXT, torch.bfloat16)):
        pool = StatePool(
            StateShape((0, 1), shape, dtype), StateSizes(3, 0, 32), torch.device("cpu")
        )
        weights = DeltaWeights(
            torch.zeros(shape.channels, 4, dtype=dtype), *torch.zeros(2, shape.num_heads)
        )
        rows, mask = torch.tensor([1, 2]), torch.zeros(2, 16, 16, dtype=torch.bool)
        states, updates = ([getattr(pool, one)(i) for i in (0, 1)] for one in ("state", "updates"))
        delta_decode_triton.has_dependent_launch = lambda _: True
        for width, tree in ((1, None), (4, None), (16, mask)):
            parts = [shape.channels, shape.num_heads, shape.num_heads]
            given = DeltaInputs(*torch.zeros(2 * width, sum(parts), dtype=dtype).split(parts, -1))
            nodes = NodeBatch(rows, torch.tensor([0, width, 2 * width]), width, tree)
            delta_rule_triton.verify(given, weights, states[0], updates[0], nodes, shape)
            if width == 1:
                delta_decode_triton.decode(given, weights, states[0], nodes, shape)
        for saves in ((), (Save(1, 2, 0),)):
            prompts = PromptBatch(rows, [3, 5], [0, 4], saves)
            given = DeltaInputs(*torch.zeros(8, sum(parts), dtype=dtype).split(parts, -1))
            delta_prompt_triton.extend(given, weights, states[0], prompts, shape)
            delta_chunks_triton.extend(given, weights, states[0], prompts, shape)
        for paths_BW in (None, torch.zeros(2, 3, dtype=torch.int64)):
            paths = StatePaths(rows, torch.tensor([0, 4]), torch.zeros_like(rows), paths_BW, 3)
            delta_rule_triton.keep(states, updates, paths, shape)
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
