"""What requests that have ended are told of the depth of their drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specengine.core.request import Req
from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.state import AdaptiveSteps


def tell_depths(ended: Sequence[Req], choosers: Iterable[AdaptiveSteps]) -> None:
    """Once, to requests that have ended, and once for all that ended under the same choice: text is
    costly."""
    told: dict[int, DepthChoice] = {}  # by identity; `choices` keeps them alive
    choices = [req.spec.depth for req in ended]
    for req, choice in zip(ended, choices, strict=True):
        if choice is not None:
            if id(choice) not in told:
                told[id(choice)] = _resolved(choice, choosers)
            req.spec.depth = told[id(choice)]


def _resolved(choice: DepthChoice, choosers: Iterable[AdaptiveSteps]) -> DepthChoice:
    for chooser in choosers:
        choice = chooser.resolved(choice)
    return choice
