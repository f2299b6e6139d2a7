"""Decides whether the depth of drafts may be chosen, and among which depths."""

from __future__ import annotations

import logging
from pathlib import Path

from specengine.core.config import EngineConfig
from specengine.core.spec import Drafter
from specengine.engine.adaptive.cost_table import StepCosts
from specengine.engine.adaptive.round import AdaptiveRound
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.draft_depth import NodeLimit
from specengine.target.verify.base import TreeVerifier

logger = logging.getLogger(__name__)

_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def make_adaptive(
    config: EngineConfig, drafter: Drafter, verifier: TreeVerifier, limit: NodeLimit
) -> AdaptiveRound | None:
    """None where nobody drafts, and where depth must not follow the clock: in traces, and where
    what a seed samples depends on the drafts that were verified, not on its distribution alone.
    Raises ConfigError for a cost table that cannot be read."""
    spec = config.spec
    if spec.algorithm is None or not spec.adaptive or config.trace.trace is not None:
        return None
    if verifier.follows_drafts:
        logger.info("drafts keep their depth: seeds would not repeat with this verifier")
        return None
    table = spec.cost_table
    costs = None if table is None else StepCosts.read(Path(table).expanduser())
    model_steps = None if spec.hybrid_suffix else spec.num_steps
    deepest = drafter.max_nodes - 1 if model_steps is None else model_steps
    steps = AdaptiveSteps(depths(deepest), costs)
    return AdaptiveRound(steps, limit, is_chain=not drafter.proposes_tree)


def depths(deepest: int) -> list[int]:
    """Every shallow one, some of the others, and the deepest."""
    return [*(one for one in _DEPTHS if one < deepest), deepest]
