"""Chooses the depth of drafts, round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.core.spec import DepthChoice
from specengine.engine.adaptive.acceptance import Acceptance
from specengine.engine.adaptive.budget import ProbeBudget
from specengine.engine.adaptive.choice import Decision, Outlook, outlook, seconds_of
from specengine.engine.adaptive.cost_table import Costs
from specengine.engine.adaptive.running_costs import RunningCosts, bucket


@dataclass(frozen=True)
class Policy:
    margin: float = 0.03  # gain for which the depth is changed
    min_rounds: int = 16  # between changes
    probe_every: int = 2  # rounds at least: one may be launched before the last has landed
    deep_tries: int = 2  # of the first rounds, where costs are to be learned
    # Likewise, and whenever plain decoding is tried again: in a row, for only a plain round behind
    # another costs what plain decoding costs.
    plain_tries: int = 4


@dataclass
class _Place:
    """What stands for a bucket of batch sizes."""

    standing: Decision | None = None
    round: int = 0
    changed: int = 0  # round of the last change
    probed: int = 0
    tries: Counter[int] = field(default_factory=Counter)
    plain_left: int = 0  # of the plain rounds that are being tried
    last_run: dict[int, int] = field(default_factory=dict)


class AdaptiveSteps:
    """`choose` before each round is launched, `observe` when it has landed, in the order of
    launching; the next may be launched in between.

    It maximises batch * E(K) / seconds(batch, K), where E(K) = 1 + the sum over i <= K of the
    product of the first i acceptances: the tokens that a round of depth K emits (Leviathan et al.
    2023, section 3). K = 0, plain decoding, is one of the choices.

    A depth stands until another is better by a margin, or plain decoding is better at all. In
    between, neighbouring depths are tried for a round, so that acceptance which came back and costs
    which changed are noticed; ProbeBudget bounds what that may cost.

    The choice depends on the outcomes and times of past rounds alone: it biases no sampled draft.
    """

    def __init__(
        self, steps: Sequence[int], costs: Costs | None = None, policy: Policy | None = None
    ) -> None:
        """steps: depths to choose from, 0 among them. costs: None to learn them from the rounds."""
        self.steps = sorted({0, *steps})
        self.costs = RunningCosts() if costs is None else costs
        self.policy = policy or Policy()
        self.acceptance = Acceptance(self.steps[-1])
        self.budget = ProbeBudget()
        self._places: dict[int, _Place] = {}
        self._batch_size = 0  # of the last round
        self._last: Decision | None = None  # of it
        self._view: Outlook | None = None  # since the last round that was observed
        self._fixed: dict[int, dict[int, float]] = {}  # seconds by batch size, of a measured table

    def choose(self, batch_size: int) -> Decision:
        self._batch_size = batch_size
        place = self._places.setdefault(bucket(batch_size), _Place())
        place.round += 1
        decision = self._decide(place, batch_size)
        place.last_run[decision.num_steps] = place.round
        self._last = decision
        return decision

    def observe(
        self,
        batch_size: int,
        num_steps: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None = None,
    ) -> None:
        """num_steps: as chosen. drafted, accepted: of each request; of a tree its nodes, and those
        on the accepted path. seconds: of the whole round; None leaves the costs as they are."""
        levels = [min(one, num_steps) for one in drafted]
        if num_steps:
            self.acceptance.observe(levels, accepted)
        self._view = None
        if seconds is not None and isinstance(self.costs, RunningCosts):
            self.costs.record(batch_size, num_steps, sum(levels), seconds)
        self._settle(batch_size, num_steps, 1 + sum(accepted) / batch_size, seconds)

    def standing(self, batch_size: int) -> Decision | None:
        """What stands for such batches; None where nothing is settled yet."""
        place = self._places.get(bucket(batch_size))
        return None if place is None else place.standing

    def told(self, choice: DepthChoice) -> DepthChoice:
        """The same with the figures of now, where it stands for the batch size that ran last."""
        if self._batch_size and self.standing(self._batch_size) is choice:
            return self.current or choice
        return choice

    @property
    def current(self) -> Decision | None:
        """What stands for the batch size that ran last, with the figures of now; while nothing
        does, what was chosen last. None before the first round."""
        place = self._places.get(bucket(self._batch_size)) if self._batch_size else None
        if place is None or place.standing is None:
            return self._last
        view = self._outlook(self._batch_size)
        return place.standing if view is None else view.decide(place.standing.num_steps)

    def _outlook(self, batch_size: int) -> Outlook | None:
        if self._view is None or self._view.batch_size != batch_size:
            coverage = max(self.acceptance.coverage, 1 / batch_size)
            seconds = self._seconds(batch_size, coverage)
            if seconds is None:
                return None
            self._view = outlook(batch_size, self.acceptance.chances(), coverage, seconds)
        return self._view

    def _seconds(self, batch_size: int, coverage: float) -> dict[int, float] | None:
        if not self.costs.is_fixed or coverage < 1:
            return seconds_of(self.costs, batch_size, coverage, self.steps)
        found = self._fixed.get(batch_size)
        if found is None:
            found = seconds_of(self.costs, batch_size, coverage, self.steps)
            assert found is not None, "a measured table knows every cost"
            self._fixed[batch_size] = found
        return found

    def _decide(self, place: _Place, batch_size: int) -> Decision:
        deepest = self.steps[-1]
        if not self.costs.is_fixed:
            for steps, tries in ((deepest, self.policy.deep_tries), (0, self.policy.plain_tries)):
                if place.tries[steps] < tries:
                    place.tries[steps] += 1
                    reason = f"batch {batch_size}: measuring the cost of K={steps}"
                    return Decision(steps, reason, None)
        view = self._outlook(batch_size)
        if view is None:
            reason = f"batch {batch_size}: K={deepest}, the cost of drafts is not known yet"
            return Decision(deepest, reason, None)
        if place.standing is None:
            place.standing, place.changed = view.decide(view.best), place.round
            return place.standing
        return self._keep_or_change(place, place.standing, view)

    def _keep_or_change(self, place: _Place, standing: Decision, view: Outlook) -> Decision:
        kept, best = standing.num_steps, view.best
        if place.plain_left > 0 and kept:
            place.plain_left -= 1
            return self._try(place, 0, kept, view)
        wants = self._is_worth_it(kept, best, view)
        if wants and self.costs.is_settled(view.batch_size, best):
            if place.round - place.changed >= self.policy.min_rounds:
                place.standing, place.changed = view.decide(best), place.round
                place.plain_left = 0
                return place.standing
            return standing
        targets = [best] if wants else self._probe_targets(kept, view.batch_size)
        if place.round - place.probed < self.policy.probe_every or not targets:
            return standing
        target = min(targets, key=lambda steps: place.last_run.get(steps, 0))
        seconds = view.seconds[kept]
        loss = view.seconds[target] - view.tokens[target] * seconds / view.tokens[kept]
        if not self.budget.allows(loss, seconds):
            return standing
        if target == 0 and not self.costs.is_fixed:
            place.plain_left = self.policy.plain_tries - 1
        return self._try(place, target, kept, view)

    def _try(self, place: _Place, target: int, kept: int, view: Outlook) -> Decision:
        place.probed = place.round
        reason = f"batch {view.batch_size}: K={target} tried for a round; K={kept} stands"
        return Decision(target, reason, view.gain(target))

    def _is_worth_it(self, kept: int, best: int, view: Outlook) -> bool:
        if best == kept:
            return False
        return view.rates[best] > (1 + self.policy.margin) * view.rates[kept] or view.gain(kept) < 1

    def _probe_targets(self, kept: int, batch_size: int) -> list[int]:
        """The next depth, of which the depth that stands tells nothing; those above it, whose
        acceptance is known, only where their cost was last seen long ago."""
        place = self.steps.index(kept)
        shallower = {0, self.steps[max(place - 1, 0)]} - {kept}
        unsure = [one for one in shallower if not self.costs.is_settled(batch_size, one)]
        return [*self.steps[place + 1 : place + 2], *unsure]

    def _settle(
        self, batch_size: int, num_steps: int, tokens: float, seconds: float | None
    ) -> None:
        """The budget earns of every round, and pays for those that ran at another depth than the
        one that stands. tokens: a request."""
        place = self._places.get(bucket(batch_size))
        view = self._outlook(batch_size)
        if place is None or place.standing is None or view is None:
            return
        kept = place.standing.num_steps
        usual = view.seconds[kept]
        if num_steps != kept:
            took = view.seconds[num_steps] if seconds is None else seconds
            self.budget.pay(took - tokens * usual / view.tokens[kept], usual)
        self.budget.earn(usual)
