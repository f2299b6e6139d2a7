"""Decides whether the depth of drafts is chosen round by round, and among which depths."""

from __future__ import annotations

import logging

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.parallel import Link
from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.costs import Costs
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.adaptive.host_rounds import AdaptiveRound
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.draft_depth import NodeLimit
from specengine.target.verify.base import TreeVerifier

logger = logging.getLogger(__name__)

_NO_DRAFTER = "nothing drafts without --speculative-algorithm"
_RECORDED = "fixed while rounds are recorded"
_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def make_adaptive(
    config: EngineConfig,
    drafter: Drafter,
    verifier: TreeVerifier,
    limit: NodeLimit,
    costs: Costs | None,
    link: Link | None,
) -> AdaptiveRound | None:
    """Chooses for rounds on the host; those on the device have a chooser of their own
    (pipeline_build), which learns apart. None where depth is fixed. costs: None to learn them from
    the rounds. link: to ranks."""
    why = why_fixed(config, verifier)
    if why is not None:
        if config.spec.algorithm is not None:
            logger.info("depth of drafts: %s", why)
        return None
    choices, is_chain = depths(deepest(config.spec, drafter)), not drafter.proposes_tree
    sizes = {} if is_chain else smaller_sizes(choices, lambda depth: _most_nodes(drafter, depth))
    model_steps = _model_steps(config.spec, drafter, choices[-1])
    chooser = DepthChooser(choices, costs, sizes=sizes, model_steps=model_steps)
    return AdaptiveRound(chooser, limit, is_chain, link)


def why_fixed(config: EngineConfig, verifier: TreeVerifier) -> str | None:
    """None where depth may be chosen. The clock must not decide on depth in traces, nor where what
    a seed samples depends on which drafts were verified."""
    if config.spec.algorithm is None:
        return _NO_DRAFTER
    if not config.spec.adaptive:
        return "fixed by --no-speculative-adaptive"
    if config.trace.trace is not None:
        return "fixed: rounds are traced"
    if verifier.text_depends_on_drafts:
        return "fixed: seeds would not repeat with this verifier"
    return None


def fixed_depth(config: EngineConfig, drafter: Drafter, verifier: TreeVerifier) -> DepthChoice:
    """The decision for rounds whose depth is not chosen."""
    steps = deepest(config.spec, drafter)
    reason = why_fixed(config, verifier) or _RECORDED
    return DepthChoice(steps, f"K={steps}, {reason}", None)


def deepest(spec: SpecConfig, drafter: Drafter) -> int:
    """The most levels of a draft. Lookup beside a model may draft as many levels as there are
    nodes. spec: resolved."""
    if spec.algorithm is None:
        return 0
    model_steps = spec.num_steps if drafter.lookup is None else None
    return drafter.max_nodes - 1 if model_steps is None else model_steps


def depths(most: int) -> list[int]:
    """Every shallow one, some of the others, and the deepest."""
    return [*(one for one in _DEPTHS if one < most), most]


def _model_steps(spec: SpecConfig, drafter: Drafter, most: int) -> int | None:
    """How deep a model drafts beside lookup; None where there are no two sources."""
    if drafter.lookup is None:
        return None
    return most if spec.num_steps is None else min(spec.num_steps, most)


def _most_nodes(drafter: Drafter, num_steps: int) -> int:
    """The most nodes of a tree so deep, root included. Lookup's trees may be as large at any
    depth."""
    has_lookup = drafter.drafts_on == "lookup" or drafter.lookup is not None
    return drafter.max_nodes if has_lookup else drafter.num_tree_nodes(num_steps)
