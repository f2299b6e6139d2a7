"""Speculative algorithms by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.request import Req
from specengine.core.spec import Drafter
from specengine.draft.empty import EmptyDrafter
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.suffix.drafter import SuffixDrafter


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may be built from."""

    spec: SpecConfig
    node_limit: Callable[[Req], int]  # most nodes a request can use now, root included


DRAFTERS: dict[str, Callable[[DraftContext], Drafter]] = {
    "NGRAM": lambda context: NgramDrafter(context.spec, context.node_limit),
    "SUFFIX": lambda context: SuffixDrafter(context.spec, context.node_limit),
}


def max_nodes(spec: SpecConfig) -> int:
    """The most nodes of a proposal, root included."""
    return 1 if spec.algorithm is None else spec.num_draft_tokens


def make_drafter(context: DraftContext) -> Drafter:
    """Raises ConfigError for an unknown algorithm, or one that --speculative-hybrid-suffix cannot
    stand beside."""
    drafter = _make_algorithm(context)
    if not context.spec.hybrid_suffix:
        return drafter
    if isinstance(drafter, EmptyDrafter | SuffixDrafter):
        raise ConfigError(
            "--speculative-hybrid-suffix stands beside another drafter; for suffix matches alone "
            "use --speculative-algorithm SUFFIX without it"
        )
    suffix = SuffixDrafter(context.spec, context.node_limit)
    return HybridDrafter(drafter, suffix, context.spec.hybrid_suffix_min_match)


def _make_algorithm(context: DraftContext) -> Drafter:
    name = context.spec.algorithm
    if name is None:
        return EmptyDrafter()
    if name.upper() not in DRAFTERS:
        known = ", ".join(DRAFTERS)
        raise ConfigError(f"--speculative-algorithm {name} is not known; known are {known}")
    return DRAFTERS[name.upper()](context)
