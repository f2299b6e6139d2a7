"""A round in flight as its pipeline knows it, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specengine.core.request import Req
from specengine.core.spec import VerifyResult
from specengine.core.spec_stats import DepthChoice
from specengine.engine.draft_depth import depths_within
from specengine.engine.round.key import InFlightRound


class RoundResult(NamedTuple):
    """A collected round, to be committed."""

    reqs: list[Req]
    result: VerifyResult


@dataclass(slots=True)
class Launched:
    """A round in flight, and how it came to be launched."""

    in_flight: InFlightRound
    choice: DepthChoice
    paused: bool  # the drafter does not observe it
    followed: bool  # it was launched before the one before it was collected
    started: float  # when its time began, by perf_counter
    drafting: float = 0.0  # seconds that the host drafted for it

    @property
    def is_deeper(self) -> bool:
        """Whether it has more steps than were chosen, because another engine that shares the
        experts has asked for them."""
        return self.in_flight.key.num_steps > self.choice.num_steps

    @property
    def limits(self) -> list[int]:
        """The most levels of each request. They do not follow from counts of drafts: those of trees
        are nodes, and those of chains include padding that was accepted."""
        in_flight = self.in_flight
        if in_flight.plan.drafted_nodes is not None:
            return depths_within(in_flight.reqs, self.choice.num_steps)
        return in_flight.plan.levels
