"""The one place that knows the engine from within: whole device rounds on a CPU, without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from specengine import LLM
from specengine.engine.round.build import make_rounds
from tests.support.device_rounds import prepare_drafter, run_on_device

SIZES = (1, 2, 4)  # requests of a round


@contextmanager
def on_the_device(llm: LLM) -> Iterator[None]:
    """Rounds of an engine that has had no request yet run whole on the device, as they do in CUDA
    graphs, each step of them called instead of replayed. Raises HostRoundsError."""
    parts = llm.engine.parts
    prepare_drafter(llm)
    graph = replace(parts.config.graph, cuda_graph_bs=SIZES)
    config = replace(parts.config, graph=graph)
    make_rounds(config, parts.worker.runner, parts.drafter, parts.verifier, False)
    run_on_device(llm, sizes=SIZES)
    yield


def counters(llm: LLM) -> tuple[int, dict[str, int]]:
    """Rounds that ran whole on the device, and by reason those that did not."""
    stats = llm.engine.stats().graphs["round"]
    return stats.replays, dict(stats.fallbacks)
