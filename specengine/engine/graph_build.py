"""Decides whether whole rounds can run on the device, and prepares the graphs of those that can."""

from __future__ import annotations

from specengine.core.config import EngineConfig
from specengine.core.spec import RowDrafter
from specengine.engine.graph_round import GraphRound
from specengine.engine.loop import EngineParts


def make_graph_round(config: EngineConfig, parts: EngineParts) -> GraphRound | None:
    """None without graphs, where somebody looks at rounds, where the drafter needs the host, and
    where the verifier does more than compare greedy tokens."""
    sizes, forced = config.graph.cuda_graph_bs, config.spec.simulate_accept_length
    if config.graph.disable_cuda_graph or sizes is None or config.trace.trace is not None:
        return None
    drafter = parts.drafter
    steps = drafter.row_steps if isinstance(drafter, RowDrafter) else None
    if not isinstance(drafter, RowDrafter) or steps is None:
        return None
    if getattr(parts.verifier, "is_lossy", True) and forced is None:
        return None
    padding = not config.graph.disable_cuda_graph_padding
    graph_round = GraphRound(parts.worker, drafter, steps, list(sizes), padding, forced)
    graph_round.capture()
    return graph_round
