"""Rounds in the air: launched on the device, and not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import Drafter, VerifyResult
from specengine.engine.adaptive.naps import Naps
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.draft_depth import depth_within, draft_within_limits
from specengine.engine.graph_round import GraphRound
from specengine.engine.host_drafts import HostDrafts
from specengine.engine.round_form import Flight
from specengine.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Landing:
    reqs: list[Req]
    result: VerifyResult


class Flights:
    """Launches rounds, lets the next one follow before the last has landed, and lands them.

    depths: how deep to draft, by what it costs and earns; None drafts as deep as there are graphs.
    A drafter on the device follows at any depth. One that reads text needs the last round's tokens
    before it drafts, so that only rounds without drafts follow unseen.
    """

    def __init__(
        self,
        graph_round: GraphRound,
        drafter: Drafter,
        scheduler: Scheduler,
        depths: AdaptiveSteps | None,
        overlaps: bool,
    ) -> None:
        self.graph_round = graph_round
        self.drafter = drafter
        self.scheduler = scheduler
        self.depths = depths
        self.overlaps = overlaps
        self.flight: Flight | None = None
        self.naps = Naps() if depths is not None and graph_round.may_sleep else None
        self._depth = 0  # of the flight
        self._asleep = False  # nor does its drafter look at it
        self._followed = False  # whether the flight was launched before the last one had landed
        self._chosen: int | None = None  # for the next one, where it could not follow
        self._landed: float | None = None  # when the last one did, if nothing else has run since
        self._since = 0.0  # when the time of the flight began

    @property
    def _reads_text(self) -> bool:
        return isinstance(self.graph_round.drafter, HostDrafts)

    @property
    def in_the_air(self) -> bool:
        return self.flight is not None

    def launch(self, batch: ScheduleBatch) -> None:
        """Fly a batch of the kind that graph_round.can_run says yes to."""
        self._since = perf_counter() if self._landed is None else self._landed
        self._depth = self._choose(batch.batch_size)
        drafted = [depth_within(req, self._depth) for req in batch.reqs]
        drafts = self.graph_round.drafter
        if isinstance(drafts, HostDrafts) and self._depth:
            proposal = draft_within_limits(self.drafter, batch, self._depth)
            drafts.set(proposal)
            drafted = proposal.num_drafted
        captures, self._followed = self.graph_round.counters["captures"], False
        self.flight = self.graph_round.launch(batch.reqs, drafted, self._asleep)
        if self.graph_round.counters["captures"] != captures:
            self._since = perf_counter()  # capturing is no round's time

    def interrupt(self) -> None:
        """Something else runs: the time until the next launch is no round's."""
        self._landed = None
        self.graph_round.wake()

    def land(self) -> Landing:
        """Wait for the flight, the next already on its way where it may be. Its outcome must be
        committed, and then `send_masks` called, before anything else runs."""
        flight, depth, since = self.flight, self._depth, self._since
        assert flight is not None
        is_usual = self._followed or depth > 0 or not self._reads_text
        self.flight = self._follow(flight) if self.overlaps else None
        result = self.graph_round.land(flight)
        self._landed = self._since = perf_counter()
        if self.depths is not None:
            counts = result.num_drafted, result.num_accepted
            # Plain rounds overlap: the first of them tells nothing of what they cost.
            took = self._landed - since if is_usual or not self.overlaps else None
            self.depths.observe(len(flight.reqs), depth, *counts, took)
        return Landing(flight.reqs, result)

    def send_masks(self) -> None:
        """To the flight, where it waits for them: a grammar goes on from what landed last."""
        if self.flight is not None:
            self.graph_round.send_masks(self.flight)

    def _follow(self, flight: Flight) -> Flight | None:
        if self._reads_text and self._depth:
            return None
        slots = self.graph_round.num_nodes + self.graph_round.num_slots
        reqs = self.scheduler.follow(flight.reqs, slots)
        if not reqs:
            return None
        depth = self._choose(len(reqs))
        if self._reads_text and depth:
            self._chosen = depth
            return None
        self._depth, self._followed = depth, True
        drafted = [depth_within(req, depth) for req in reqs]
        return self.graph_round.follow(reqs, drafted, self._asleep)

    def _choose(self, batch_size: int) -> int:
        self._asleep = False
        if self.depths is None:
            return self.graph_round.steps[-1]
        if self.naps is not None and self.naps.sleeps(self.depths.standing(batch_size)):
            self._asleep = True
            return 0
        if self._chosen is not None:
            depth, self._chosen = self._chosen, None
            return depth
        return self.depths.choose(batch_size).num_steps
