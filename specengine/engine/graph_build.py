"""Decides whether whole rounds can run on the device, and prepares the graphs of those that can."""

from __future__ import annotations

import logging

import torch

from specengine.core.config import EngineConfig
from specengine.core.spec import Drafter, RowDrafter, TextDrafter
from specengine.engine.graph_round import GraphRound
from specengine.engine.host_drafts import HostDrafts
from specengine.engine.loop import EngineParts

logger = logging.getLogger(__name__)

_NO_GRAPHS = "no graphs of whole rounds: %s"


def make_graph_round(config: EngineConfig, parts: EngineParts) -> GraphRound | None:
    """None without graphs, where somebody looks at rounds, where the drafter needs the host, and
    where the verifier does more than compare greedy tokens."""
    sizes, forced = config.graph.cuda_graph_bs, config.spec.simulate_accept_length
    if config.graph.disable_cuda_graph or sizes is None:
        return None
    if config.trace.trace is not None:
        logger.info(_NO_GRAPHS, "rounds are traced")
        return None
    found = _row_drafter(parts.drafter, max(sizes), parts.worker.runner.device)
    if found is None:
        logger.info(_NO_GRAPHS, "the drafter needs the host in the middle of a round")
        return None
    if getattr(parts.verifier, "is_lossy", True) and forced is None:
        logger.info(_NO_GRAPHS, "the verifier does more than compare tokens")
        return None
    padding = not config.graph.disable_cuda_graph_padding
    drafter, steps = found
    graph_round = GraphRound(parts.worker, drafter, steps, list(sizes), padding, forced)
    graph_round.capture()
    return graph_round


def _row_drafter(
    drafter: Drafter, batch_size: int, device: torch.device
) -> tuple[RowDrafter, list[int]] | None:
    """Who drafts in graphs, and how deep."""
    is_of_text = isinstance(drafter, TextDrafter) and drafter.reads_text_alone
    if is_of_text and not drafter.proposes_tree:
        most = drafter.max_nodes - 1
        steps = [0, *(n for n in (3,) if n < most), most]
        return HostDrafts(batch_size, most, device), steps
    steps_of_rows = drafter.row_steps if isinstance(drafter, RowDrafter) else None
    if not isinstance(drafter, RowDrafter) or steps_of_rows is None:
        return None
    return drafter, [steps_of_rows]
