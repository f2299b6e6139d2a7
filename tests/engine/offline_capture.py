"""The kernels that precompiling an engine's graphs asks for, and those that their capture needs; on
tensors of the CPU that kernels take for a GPU's, in a process of its own. Prints both by name.

Arguments: target, and for each engine a section on speculation and how many times as many captures
there are as run, which are drawn, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.drafter import Drafter
from specengine.draft.worker import DraftWorker
from specengine.engine import build, precompile
from specengine.engine.forward_graphs_build import add_ragged_graphs
from specengine.engine.round.build import HostRoundsError, make_rounds
from specengine.engine.round.executor import RoundExecutor
from specengine.kernels.cuda import program
from specengine.kernels.precompile import precompile as stage
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


def note(mode: Operators, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    mode.names.add(func.overloadpacket.__name__)
    return func(*args, **(kwargs or {}))


# Not in the class: PyTorch wraps what it finds there, and with the first call imports its compiler.
Operators.__torch_dispatch__ = note  # type: ignore[method-assign]


def record() -> set[Kernel]:
    """From now on all kernels to be compiled are noted here."""
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


def make_no_products() -> torch.library.Library:
    """Of PyTorch's products only shapes count here, and they would take half of the time. While
    what is returned is kept."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_zeros(*x.shape[:-1], len(weight))

    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", linear, "CPU")
    return library


def make(config: EngineConfig) -> tuple[ModelRunner, RoundExecutor | None, Drafter]:
    engine = build.build_engine(config)
    graph = replace(config.graph, cuda_graph_bs=tuple(SIZES), disable_cuda_graph=False)
    backend = TritonAttentionBackend(torch.device("cpu"))
    runner, drafter = engine.parts.worker.runner, engine.parts.drafter
    inner = getattr(drafter, "inner", drafter)
    for one in (runner, *getattr(inner, "runners", ())):
        one.attn_backend = backend
    if isinstance(inner, DraftWorker):
        inner.device_rounds = True
    parts, config = engine.parts, replace(config, graph=graph)
    add_ragged_graphs(config, runner, getattr(inner, "runners", ()))
    with suppress(HostRoundsError):
        chooses = parts.adaptive is not None
        return runner, make_rounds(config, runner, drafter, parts.verifier, chooses), drafter
    return runner, None, drafter


def calls_of_all(
    runner: ModelRunner, rounds: RoundExecutor | None, drafter: Drafter
) -> Iterator[Callable[[], object]]:
    """Everything that is captured, at start and while the engine is idle."""
    decode, prefill = DecodeGraphs(runner, SIZES, True), PrefillGraphs(runner)
    yield from (partial(decode.precompile, size) for size in SIZES)
    yield from (partial(prefill.precompile, key) for key in prefill.keys)
    if rounds is None:
        return
    for size in SIZES:
        for key in rounds.keys(size, rounds.sampling.greedy):
            yield partial(precompile._run, rounds, key)
    for size in {*SIZES[::3], *SIZES[-2:]}:  # more kinds of rounds than sampling has kernels
        for key in rounds.keys(size, rounds.sampling.sampled):
            yield partial(precompile._run, rounds, key)
    yield from drafter.precompile_calls()


def parts_of(rounds: RoundExecutor) -> list[str]:
    """Where drafts come from, how they are laid out, and the rule."""
    round = rounds.round
    return [type(one).__name__ for one in (round.source, round.layout, round.rule)]


def compare(config: EngineConfig, asked: set[Kernel], times: int) -> dict[str, Any]:
    """times: as many captures as run."""
    runner, rounds, drafter = make(config)
    asked.clear()
    with torch.inference_mode():
        with stage(), Operators() as operators:
            calls = [*precompile._representative_calls(runner, SIZES, True, rounds, drafter)]
            for call in calls:
                call()
        precompiled = set(asked)  # a stage ends when all has been asked for
        with stage():
            captures = [*calls_of_all(runner, rounds, drafter)]
            for call in random.Random(0).sample(captures, -(-len(captures) // times)):
                call()
    missed = Counter(name for name, _ in asked - precompiled)
    kernels = Counter(name for name, _ in precompiled)
    return {
        "calls": len(calls),
        "of": len(captures),
        "kernels": kernels,
        "missed": missed,
        "rounds": None if rounds is None else parts_of(rounds),
        "operators": sorted(operators.names),
    }


def main(target: str, *sections: str) -> None:
    offline_triton.use()
    flags: dict[str, Any] = {"model": target, "dtype": "bfloat16", "max_total_tokens": 4096}
    flags["max_running_requests"] = max(SIZES)
    import specengine.kernels.linear.few_row_cuda  # noqa: F401  loaded, so that it is replaced, too

    take_for_gpu()
    asked, _products = record(), make_no_products()
    given = [(SpecConfig(**spec), times) for spec, times in map(json.loads, sections)]
    found = [compare(config_from_flags(flags, spec), asked, times) for spec, times in given]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
