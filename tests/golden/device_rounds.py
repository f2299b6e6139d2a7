"""The one place that knows the engine from within: whole device rounds on a CPU, without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specengine import LLM
from specengine.engine import graph_build, graph_round, graph_ruled
from tests.engine.flying_world import Passed, capture, capture_parts
from tests.engine.test_graph_round import DeviceLengths

SIZES = (1, 2, 4)  # requests of a round


class RefusedError(Exception):
    """No round of the engine can run on the device; says why."""


@contextmanager
def on_the_device(llm: LLM) -> Iterator[None]:
    """Rounds of an engine that has had no request yet run whole on the device, as they do in CUDA
    graphs, each step of them called instead of replayed. Raises RefusedError."""
    engine, parts = llm.engine, llm.engine.parts
    inner = getattr(parts.drafter, "inner", parts.drafter)
    if hasattr(inner, "flies"):
        inner.flies = True
    for runner in (parts.worker.runner, *getattr(inner, "runners", ())):
        runner.attn_backend = DeviceLengths(torch.device("cpu"))
    graph = replace(parts.config.graph, cuda_graph_bs=SIZES)
    config = replace(parts.config, graph=graph)
    found = graph_build.make_graph_round(config, parts)
    if isinstance(found, str):
        raise RefusedError(found)
    with ExitStack() as stack:
        for owner, name, value in _replaced():
            stack.enter_context(patch.object(owner, name, value))
        engine.flights = graph_build.Flights(found, parts.drafter, parts.scheduler, None, True)
        yield


def _replaced() -> Sequence[tuple[Any, str, Callable[..., object]]]:
    return [
        (graph_round, "capture", capture),
        (graph_ruled, "capture_parts", capture_parts),
        (torch.cuda, "Event", Passed),
        (Tensor, "pin_memory", lambda self: self),
    ]


def counters(llm: LLM) -> tuple[int, dict[str, int]]:
    """Rounds that ran whole on the device, and by reason those that did not."""
    stats = llm.engine.stats().graphs["round"]
    return stats.replays, dict(stats.fallbacks)
