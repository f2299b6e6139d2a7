"""What drafts promise, by what is known of their costs and of how they stand."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.engine.adaptive.choice import Outlook, Shape, outlook, seconds_of
from specengine.engine.adaptive.cost_table import Costs
from specengine.engine.adaptive.heard import Heard
from specengine.engine.adaptive.host_seconds import HostSeconds
from specengine.engine.adaptive.mixed_acceptance import MixedAcceptance
from specengine.engine.adaptive.tree_acceptance import Outcomes, TreeAcceptance, cut_size


class Prospects:
    """Reckoned anew when something was learned. It is asked in every round, between two of them:
    where the host is slower than the device, what it takes is time of each round."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        costs: Costs,
        acceptance: TreeAcceptance | MixedAcceptance,
        host: HostSeconds | None,
        pads: bool,
    ) -> None:
        """shapes: to choose from. host: beside costs that are the device's alone. pads: rounds cost
        as if all requests drafted; where drafts have two sources, acceptance knows of it."""
        self.shapes = shapes
        self.costs = costs
        self.acceptance = acceptance
        self.host = host
        self.is_mixed = isinstance(acceptance, MixedAcceptance)
        self._steps = sorted({one.num_steps for one in shapes})
        self._pads = pads and not self.is_mixed
        self._heard: Heard | None = None
        self._view: Outlook | None = None  # since something was learned
        self._fixed: dict[int, dict[Shape, float]] = {}  # by batch size, of a measured table

    def of(self, batch_size: int) -> Outlook | None:
        """The same one while nothing changes; None while costs are unknown."""
        if self._view is None or self._view.batch_size != batch_size:
            self._view = self._reckon(batch_size, keeps=True)
        return self._view

    def glance(self, batch_size: int) -> Outlook | None:
        """Likewise, from whatever thread: nothing is kept of it."""
        view = self._view
        if view is not None and view.batch_size == batch_size:
            return view
        return self._reckon(batch_size, keeps=False)

    def _reckon(self, batch_size: int, keeps: bool) -> Outlook | None:
        coverage = max(self.acceptance.coverage, 1 / batch_size)
        seconds = self._seconds(batch_size, coverage, keeps)
        if seconds is None:
            return None
        if not self.acceptance.is_told:
            seconds = {one: cost for one, cost in seconds.items() if one.num_nodes is None}
        chances = self.acceptance.by_size({one.num_nodes for one in seconds})
        return outlook(batch_size, chances, coverage, seconds)

    def hear(
        self,
        shape: Shape,
        drafted: Sequence[int],
        accepted: Sequence[int],
        limits: Sequence[int] | None,
        ranks: Sequence[Sequence[int]] | None,
    ) -> None:
        """A round of drafts that may wait to be learned from. As to AdaptiveSteps.observe."""
        heard = self._heard
        kind = shape, ranks is not None, cut_size(drafted, shape.num_nodes)
        if heard is None or heard.kind != kind:
            self.learn_heard()
            heard = self._heard = Heard(kind)
        if heard.add(drafted, accepted, limits, ranks):
            self.learn_heard()

    def learn_heard(self) -> None:
        """What still waits for it."""
        heard, self._heard = self._heard, None
        if heard is not None:
            self.acceptance.observe(heard.num_steps, heard.outcomes)
            self._view = None

    def learn(self, num_steps: int, outcomes: Outcomes) -> None:
        self.learn_heard()
        self.acceptance.observe(num_steps, outcomes)
        self._view = None

    def forget(self) -> None:
        """Costs that are learned have changed."""
        self._view = None

    def forget_costs(self) -> None:
        """Those that were measured have, or the host's."""
        self._fixed.clear()
        self._view = None

    def _seconds(self, batch_size: int, coverage: float, keeps: bool) -> dict[Shape, float] | None:
        if self._pads and self.costs.is_fixed:
            # A request near its end drafts less, and hardly a batch is without one for long.
            coverage = 1.0
        is_known = self.costs.is_fixed and coverage == 1 and not self.is_mixed
        if is_known and batch_size in self._fixed:
            return self._fixed[batch_size]
        mean_levels = self.acceptance.mean_levels
        levels = {k: coverage * mean_levels(k, batch_size) for k in self._steps}
        found = seconds_of(self.costs, batch_size, levels, self.shapes)
        if found is not None and self.host is not None:
            found = self.host.of(batch_size, found)
        if is_known and keeps:
            assert found is not None, "a measured table knows every cost"
            self._fixed[batch_size] = found
        return found
