"""How deep drafts go where depth is not chosen round by round, and why it is not."""

from __future__ import annotations

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.engine.adaptive.choice import Decision
from specengine.target.verify.base import TreeVerifier

_NOBODY = "nothing drafts without --speculative-algorithm"
_LOOKED_AT = "fixed while somebody looks at rounds"


def why_fixed(config: EngineConfig, verifier: TreeVerifier) -> str | None:
    """None where depth may be chosen. It must not follow the clock in traces, nor where what a seed
    samples depends on the drafts that were verified, not on its distribution alone."""
    if config.spec.algorithm is None:
        return _NOBODY
    if not config.spec.adaptive:
        return "fixed by --no-speculative-adaptive"
    if config.trace.trace is not None:
        return "fixed: rounds are traced"
    if verifier.follows_drafts:
        return "fixed: seeds would not repeat with this verifier"
    return None


def fixed_depth(config: EngineConfig, drafter: Drafter, verifier: TreeVerifier) -> Decision:
    """What rounds run under that no choice was made for."""
    steps = deepest(config.spec, drafter)
    reason = why_fixed(config, verifier) or _LOOKED_AT
    return Decision(steps, f"K={steps}, {reason}", None)


def deepest(spec: SpecConfig, drafter: Drafter) -> int:
    """The most levels of a draft; a text's match beside a model may be as long as there are nodes.
    spec: resolved."""
    if spec.algorithm is None:
        return 0
    model_steps = None if spec.hybrid_suffix else spec.num_steps
    return drafter.max_nodes - 1 if model_steps is None else model_steps
