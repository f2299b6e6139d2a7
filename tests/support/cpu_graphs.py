"""Graphs on a CPU: functions that are called again and write to the tensors of their first run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specengine import LLM
from specengine.draft.worker import DraftWorker
from specengine.engine.forward_graphs_build import add_draft_loops, add_ragged_graphs
from specengine.runner import graph_cache
from specengine.runner.forward_graphs.decode import DecodeGraphs
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from tests.support.device_lengths import DeviceLengths


@dataclass
class Function:
    """Stands for a CUDA graph. output: a dataclass of tensors, or None."""

    run: Callable[[], Any]
    output: Any

    def replay(self) -> None:
        again = self.run()
        if self.output is None:
            return
        for kept, found in zip(vars(self.output).values(), vars(again).values(), strict=True):
            if kept is not None:
                kept.copy_(found)


def capture(run: Callable[[], Any], pool: object, platform: object) -> tuple[Function, Any]:
    output = run()
    return Function(run, output), output


def use_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every cache of graphs record functions."""
    monkeypatch.setattr(graph_cache, "capture", capture)


def graphs_on_the_cpu(llm: LLM, in_one: bool = True) -> dict[str, Any]:
    """Give an engine graphs of verification, of drafters' forwards and, with in_one, of whole draft
    loops; gives their counters by kind. For use after use_functions."""
    parts = llm.engine.parts
    config = parts.config
    graph = replace(
        config.graph,
        disable_cuda_graph=False,
        cuda_graph_bs=(1, 2, 4),
    )
    target = parts.worker.runner
    drafter = getattr(parts.drafter, "inner", parts.drafter)
    drafts = drafter.runners if isinstance(drafter, DraftWorker) else ()
    backend = DeviceLengths(torch.device("cpu"))
    for runner in (target, *drafts):
        runner.attn_backend = backend
    config = replace(config, graph=graph)
    loops = add_draft_loops(config, parts.drafter) if in_one else {}
    return dict(add_ragged_graphs(config, target, drafts) | loops)


def capture_on_the_cpu(llm: LLM, batch_sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an engine's target graphs of decode steps and prefills, as ModelRunner does on a GPU."""
    use_functions(monkeypatch)
    runner = llm.engine.parts.worker.runner
    runner.attn_backend = DeviceLengths(torch.device("cpu"))
    runner.decode_graphs = DecodeGraphs(runner, batch_sizes, padding=True)
    runner.decode_graphs.capture()
    runner.prefill_graphs = PrefillGraphs(runner)
    runner.prefill_graphs.capture()
