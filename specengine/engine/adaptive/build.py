"""Decides whether the depth of drafts may be chosen, and among which depths."""

from __future__ import annotations

import logging

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.engine.adaptive.choice import smaller_sizes
from specengine.engine.adaptive.cost_table import Costs
from specengine.engine.adaptive.round import AdaptiveRound
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.draft_depth import NodeLimit
from specengine.engine.fixed_depth import deepest, why_fixed
from specengine.target.verify.base import TreeVerifier

logger = logging.getLogger(__name__)

_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def make_adaptive(
    config: EngineConfig,
    drafter: Drafter,
    verifier: TreeVerifier,
    limit: NodeLimit,
    costs: Costs | None = None,
) -> AdaptiveRound | None:
    """None where depth is fixed. costs: None to learn them from the rounds."""
    why = why_fixed(config, verifier)
    if why is not None:
        if config.spec.algorithm is not None:
            logger.info("depth of drafts: %s", why)
        return None
    choices, is_chain = depths(deepest(config.spec, drafter)), not drafter.proposes_tree
    sizes = {} if is_chain else smaller_sizes(choices, lambda depth: most_nodes(drafter, depth))
    model_steps = _model_steps(config.spec, drafter, choices[-1])
    steps = AdaptiveSteps(choices, costs, sizes=sizes, model_steps=model_steps)
    return AdaptiveRound(steps, limit, is_chain)


def _model_steps(spec: SpecConfig, drafter: Drafter, most: int) -> int | None:
    """How deep a model drafts beside text; None where there are no two sources."""
    if drafter.lookup is None:
        return None
    return most if spec.num_steps is None else min(spec.num_steps, most)


def most_nodes(drafter: Drafter, num_steps: int) -> int:
    """Of a tree so deep, root included."""
    return drafter.num_tree_nodes(num_steps)


def depths(most: int) -> list[int]:
    """Every shallow one, some of the others, and the deepest."""
    return [*(one for one in _DEPTHS if one < most), most]
