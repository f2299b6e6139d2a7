"""Graphs of single forwards on a CPU: functions that are called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specengine import LLM
from specengine.draft.worker import DraftWorker
from specengine.engine.forward_graphs_build import add_draft_loops, add_ragged_graphs
from tests.support.device_lengths import DeviceLengths
from tests.support.rounds import with_graphs


@dataclass
class Function:
    """Stands for a graph: runs again, and writes to the tensors that it wrote at first."""

    run: Callable[[], Any]
    output: Any

    def replay(self) -> None:
        for place, found in zip(vars(self.output).values(), vars(self.run()).values(), strict=True):
            if place is not None:
                place.copy_(found)


def capture(run: Callable[[], Any], pool: object, platform: object) -> tuple[Function, Any]:
    output = run()
    return Function(run, output), output


def graphs_on_the_cpu(llm: LLM, in_one: bool = True) -> dict[str, Any]:
    """Counters by kind of graph. in_one: a chain or a tree is drafted in one graph."""
    parts, config = llm.engine.parts, with_graphs(llm)
    drafter = getattr(parts.drafter, "inner", parts.drafter)
    drafts = drafter.runners if isinstance(drafter, DraftWorker) else ()
    backend = DeviceLengths(torch.device("cpu"))
    for runner in (parts.worker.runner, *drafts):
        runner.attn_backend = backend
    loops = add_draft_loops(config, parts.drafter) if in_one else {}
    return dict(add_ragged_graphs(config, parts.worker.runner, drafts) | loops)
