"""What a rehearsal of an engine's graphs asks for, and what their capture would; on tensors of the
CPU that kernels take for a GPU's, in a process of its own. Prints both by the kernels' names.

Arguments: target, and sections on speculation as JSON, for each of which an engine is made.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.engine import build, rehearsal
from specengine.engine.graph_build import make_graph_round
from specengine.engine.graph_round import GraphRound
from specengine.engine.round_form import Form
from specengine.kernels.cuda import program
from specengine.kernels.rehearsal import rehearsal as stage
from specengine.runner.attention.triton_backend import TritonAttentionBackend
from specengine.runner.forward_graphs.decode import DecodeGraphs
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.loader import load
from specengine.runner.model_runner import ModelRunner
from tests.kernels import offline_triton

SIZES = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8), *range(64, 257, 32)]

Kernel = tuple[str, Any]


class Operators(TorchDispatchMode):
    """Names of PyTorch's that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def record() -> set[Kernel]:
    """From now on whatever is to be compiled goes there."""
    from triton.runtime.jit import JITFunction

    asked: set[Kernel] = set()

    def compile_triton(kernel: Any, key: Any, *_: Any) -> None:
        asked.add((kernel.__name__, key))

    def compile_cuda(source: Any, defines: Any, device: int) -> bytes:
        asked.add((source.stem, defines))
        return b""

    JITFunction._do_compile = compile_triton
    program._binary = compile_cuda
    return asked


def take_for_gpu() -> None:
    """As dispatch would on a Hopper with everything installed."""

    def yes(*_: object) -> bool:
        return True

    load.pack_linears = lambda *_: None  # type: ignore[assignment]
    torch.cuda.Event = type("Event", (), {})  # type: ignore[misc,assignment]
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]
    program.available = yes  # type: ignore[assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("specengine."):
            for dispatch in ("use_triton", "has_dependent_launch", "has_much_shared"):
                if hasattr(module, dispatch):
                    setattr(module, dispatch, yes)
            if hasattr(module, "multiprocessors"):
                module.multiprocessors = lambda device: 132


def make(config: EngineConfig) -> tuple[ModelRunner, GraphRound | None]:
    engine = build.build_engine(config)
    graph = replace(config.graph, cuda_graph_bs=tuple(SIZES), disable_cuda_graph=False)
    backend = TritonAttentionBackend(torch.device("cpu"))
    runner, drafter = engine.parts.worker.runner, engine.parts.drafter
    inner = getattr(drafter, "inner", drafter)
    for one in (runner, *getattr(inner, "runners", ())):
        one.attn_backend = backend
    if hasattr(inner, "flies"):
        inner.flies = True
    found = make_graph_round(replace(config, graph=graph), engine.parts)
    return runner, None if isinstance(found, str) else found


def every_act(runner: ModelRunner, flying: GraphRound | None) -> Iterator[None]:
    """All that is captured."""
    decode, prefill = DecodeGraphs(runner, SIZES, True), PrefillGraphs(runner)
    for size in SIZES:
        yield decode.precompile(size)
    for key in prefill.keys:
        yield prefill.precompile(key)
    if flying is None:
        return
    for size in SIZES:
        for form in flying.forms(size, flying.choices.greedy):
            yield rehearsal._fly(flying, form)
    yield rehearsal._fly(flying, Form(SIZES[0], flying.steps[-1], flying.choices.sampled))


def compare(config: EngineConfig, asked: set[Kernel]) -> dict[str, Any]:
    runner, flying = make(config)
    asked.clear()
    with torch.inference_mode():
        with stage():
            acts = [*rehearsal._telling_acts(runner, SIZES, True, flying)]
            for act in acts:
                act()
        foreseen = set(asked)  # a stage ends when all has been asked for
        with stage(), Operators() as operators:
            count = sum(1 for _ in every_act(runner, flying))
    missed = Counter(name for name, _ in asked - foreseen)
    kernels = Counter(name for name, _ in foreseen)
    found = {"acts": len(acts), "of": count, "kernels": kernels, "missed": missed}
    return {**found, "rounds": type(flying).__name__, "operators": sorted(operators.names)}


def main(target: str, *specs: str) -> None:
    offline_triton.use()
    flags: dict[str, Any] = {"model": target, "dtype": "bfloat16", "max_total_tokens": 4096}
    flags["max_running_requests"] = max(SIZES)
    import specengine.kernels.few_row_cuda  # noqa: F401  that it is there to be told

    take_for_gpu()
    asked = record()
    configs = [config_from_flags(flags, SpecConfig(**json.loads(spec))) for spec in specs]
    print(json.dumps([compare(config, asked) for config in configs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
