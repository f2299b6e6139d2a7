"""Chooses the depth of drafts, and of trees their size, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specengine.core.spec import DepthChoice
from specengine.engine.adaptive.choice import (
    PLAIN,
    Decision,
    Outlook,
    Shape,
    all_shapes,
)
from specengine.engine.adaptive.cost_table import Costs, StepCosts
from specengine.engine.adaptive.host_seconds import HostSeconds
from specengine.engine.adaptive.mixed_acceptance import acceptance_of
from specengine.engine.adaptive.place import Place, Policy
from specengine.engine.adaptive.prospects import Prospects
from specengine.engine.adaptive.running_costs import RunningCosts, bucket
from specengine.engine.adaptive.tree_acceptance import Outcomes


class AdaptiveSteps:
    """`choose` before each round is launched, `observe` when it has landed, in the order of
    launching; the next may be launched in between.

    It maximises batch * E(K) / seconds(batch, K), where E(K) = 1 + the sum over i <= K of the
    product of the first i acceptances: the tokens that a round of depth K emits (Leviathan et al.
    2023, section 3). K = 0, plain decoding, is one of the choices.

    Where the drafter says which nodes of its trees are the best, smaller trees of a depth are
    choices too: what they would have accepted is known from every round that ran a larger one.

    A shape stands until another is better by a margin, or plain decoding is better at all. In
    between, neighbouring shapes are tried for a round, so that acceptance which came back and costs
    which changed are noticed; ProbeBudget bounds what that may cost, for each bucket of batch sizes
    by itself: what was lost at one does not keep another from its best choice. A shape that seems
    better by the margin, and plain decoding that seems better at all, is tried whatever the budget
    says: each try that disappoints lowers the estimate.

    The choice depends on the outcomes and times of past rounds alone: it biases no sampled draft.
    """

    def __init__(
        self,
        steps: Sequence[int],
        costs: Costs | None = None,
        policy: Policy | None = None,
        sizes: Mapping[int, Sequence[int]] | None = None,
        host: HostSeconds | None = None,
        model_steps: int | None = None,
        pads: bool = False,
    ) -> None:
        """steps: depths to choose from, 0 among them. costs: None to learn them from the rounds.
        sizes: by depth, of smaller trees to choose from, in nodes, root included. host: beside
        costs that are the device's alone. model_steps: as to acceptance_of. pads: there, and to
        Prospects."""
        self.steps = sorted({0, *steps})
        self.sizes = sizes or {}
        self.shapes = all_shapes(self.steps, self.sizes)
        self.costs = RunningCosts() if costs is None else costs
        self.host = host
        self.policy = policy or Policy()
        known = {one.num_nodes for one in self.shapes if one.num_nodes is not None}
        self.acceptance = acceptance_of(self.steps[-1], model_steps, sorted(known), pads)
        self.prospects = Prospects(self.shapes, self.costs, self.acceptance, host, pads)
        self._places: dict[int, Place] = {}
        self._batch_size = 0  # of the last round
        self._last: Decision | None = None  # of it

    def choose(self, batch_size: int) -> Decision:
        self._batch_size = batch_size
        if (place := self._places.get(key := bucket(batch_size))) is None:
            place = self._places[key] = Place()
        place.round += 1
        decision = self._decide(place, batch_size)
        place.last_run[decision.shape] = place.round
        self._last = decision
        return decision

    def observe(
        self,
        batch_size: int,
        num_steps: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None = None,
        num_nodes: int | None = None,
        ranks: Sequence[Sequence[int]] | None = None,
        limits: Sequence[int] | None = None,
        drafting: float = 0.0,
        of_text: Sequence[bool] | None = None,
    ) -> None:
        """num_steps, num_nodes: as chosen. drafted, accepted: of each request; of a tree its nodes,
        and those on the accepted path. seconds: of the whole round; None leaves the costs as they
        are. ranks: of the drafts that stand (VerifyResult.path_ranks). limits: the most levels of
        each request, which the nodes of its tree do not tell. drafting: of the seconds, those in
        which the host drafted. of_text: as in core.spec.DraftProposal."""
        outcomes, shape = None, Shape(num_steps, num_nodes)
        if self._only_earns(batch_size, shape):
            if num_steps:
                self.prospects.hear(shape, drafted, accepted, limits, ranks)
            return
        if num_steps:
            outcomes = Outcomes(drafted, accepted, ranks, num_nodes, limits, of_text)
            self.prospects.learn(num_steps, outcomes)
        if seconds is not None and isinstance(self.costs, RunningCosts):
            levels = 0 if outcomes is None else sum(self.acceptance.levels(num_steps, outcomes))
            self.costs.record(batch_size, num_steps, levels, seconds, num_nodes)
            self.prospects.forget()
        self._settle(batch_size, shape, 1 + sum(accepted) / batch_size, seconds, drafting)

    def host_took(self, batch_size: int, shape: Shape, seconds: float) -> None:
        """Between the landing of such a round and the moment when nothing was left to do but to
        wait for the next one."""
        if self.host is not None and self.host.record(batch_size, shape, seconds):
            self.prospects.forget_costs()

    def reads(self, batch_size: int, tokens: float) -> bool:
        """So many requests that are about to run have so much text, the mean of them. Whether
        costs are others for it, and by these drafts pay."""
        if not isinstance(self.costs, StepCosts) or not self.costs.go_to(tokens):
            return False
        self.prospects.forget_costs()
        view = self.prospects.of(batch_size)
        return view is not None and view.best != PLAIN

    def slept(self, batch_size: int, rounds: int) -> None:
        """So many plain rounds that stand have run and are not observed."""
        if (place := self._places.get(bucket(batch_size))) is not None:
            place.unearned += rounds

    def standing(self, batch_size: int) -> Decision | None:
        """What stands for such batches; None where nothing is settled yet."""
        place = self._places.get(bucket(batch_size))
        return None if place is None else place.standing

    def told(self, choice: DepthChoice) -> DepthChoice:
        """The same with the figures of now, where it stands for the batch size that ran last."""
        if self._batch_size and self.standing(self._batch_size) is choice:
            self.prospects.learn_heard()
            return self._shown(self.prospects.of) or choice
        return choice

    @property
    def current(self) -> Decision | None:
        """What stands for the batch size that ran last, with the figures of a few rounds ago at
        most; while nothing does, what was chosen last. None before the first round. From whatever
        thread."""
        return self._shown(self.prospects.glance)

    def _shown(self, look: Callable[[int], Outlook | None]) -> Decision | None:
        batch_size = self._batch_size
        place = self._places.get(bucket(batch_size)) if batch_size else None
        standing = None if place is None else place.standing
        if standing is None:
            return self._last
        view = look(batch_size)
        return standing if view is None else view.decide(standing.shape)

    def _decide(self, place: Place, batch_size: int) -> Decision:
        deepest = Shape(self.steps[-1])
        if isinstance(self.costs, RunningCosts) and not self.costs.is_given(batch_size):
            tries = (deepest, self.policy.deep_tries), (PLAIN, self.policy.plain_tries)
            for shape, count in tries:
                if place.tries[shape] < count:
                    place.tries[shape] += 1
                    reason = f"batch {batch_size}: measuring the cost of {shape}"
                    return Decision(shape.num_steps, reason, None)
        view = self.prospects.of(batch_size)
        if view is None:
            reason = f"batch {batch_size}: {deepest}, the cost of drafts is not known yet"
            return Decision(deepest.num_steps, reason, None)
        if place.standing is None:
            place.standing, place.changed = view.decide(view.best), place.round
            return place.standing
        return self._keep_or_change(place, place.standing, view)

    def _keep_or_change(self, place: Place, standing: Decision, view: Outlook) -> Decision:
        kept, best = standing.shape, view.best
        if place.plain_left > 0 and kept != PLAIN:
            place.plain_left -= 1
            return self._try(place, PLAIN, kept, view)
        if place.quiet is view:
            return standing
        wants = self._is_worth_it(kept, best, view)
        if wants and self._is_settled(best, view):
            if place.round - place.changed >= self.policy.min_rounds:
                place.standing, place.changed = view.decide(best), place.round
                place.plain_left = 0
                return place.standing
            return standing
        targets = [best] if wants else self._probe_targets(kept, view)
        if not targets:
            place.quiet = view
        if place.round - place.probed < self.policy.probe_every or not targets:
            return standing
        target = min(targets, key=lambda shape: place.last_run.get(shape, 0))
        if PLAIN in targets and place.last_probe != PLAIN and view.gain(kept) < self.policy.sure:
            target = PLAIN
        seconds = view.seconds[kept]
        loss = view.seconds[target] - view.tokens[target] * seconds / view.tokens[kept]
        self._earn(place, seconds)
        # What seems better, and plain decoding, are tried whatever earlier probes have cost.
        is_owed = loss < 0 and (wants or target == PLAIN)
        if not (is_owed or place.budget.allows(loss, seconds)):
            return standing
        if target == PLAIN and not self.costs.is_fixed:
            place.plain_left = self.policy.plain_tries - 1
        return self._try(place, target, kept, view)

    def _try(self, place: Place, target: Shape, kept: Shape, view: Outlook) -> Decision:
        place.probed, place.last_probe = place.round, target
        reason = f"batch {view.batch_size}: {target} tried for a round; {kept} stands"
        return Decision(target.num_steps, reason, view.gain(target), target.num_nodes)

    def _is_settled(self, shape: Shape, view: Outlook) -> bool:
        return self.costs.is_settled(view.batch_size, shape.num_steps, shape.num_nodes)

    def _is_worth_it(self, kept: Shape, best: Shape, view: Outlook) -> bool:
        if best == kept:
            return False
        return view.rates[best] > (1 + self.policy.margin) * view.rates[kept] or view.gain(kept) < 1

    def _probe_targets(self, kept: Shape, view: Outlook) -> list[Shape]:
        """The next depth and the next size, of which the shape that stands tells nothing; those
        below them, whose acceptance is known, only where their cost was last seen long ago."""
        place = self.steps.index(kept.num_steps)
        same = [one for one in view.rates if one.num_steps == kept.num_steps]
        size = same.index(kept)
        deeper = self.steps[place + 1 : place + 2]
        above = [*(_like(kept, depth, view) for depth in deeper), *same[size + 1 : size + 2]]
        if self.costs.is_fixed:
            return above
        below = [PLAIN, _like(kept, self.steps[max(place - 1, 0)], view), *same[:size]]
        below += [one for one in view.rates if one.num_steps in deeper and one.num_nodes]
        asked = {*above, kept}
        unsure = [one for one in dict.fromkeys(below) if one not in asked]
        return [*above, *(one for one in unsure if not self._is_settled(one, view))]

    def _settle(
        self,
        batch_size: int,
        shape: Shape,
        tokens: float,
        seconds: float | None,
        drafting: float,
    ) -> None:
        """The budget earns of every round, and pays for those of another shape than the one that
        stands. tokens: a request."""
        place = self._places.get(bucket(batch_size))
        view = self.prospects.of(batch_size)
        if place is None or place.standing is None or view is None:
            return
        kept = place.standing.shape
        usual = view.seconds[kept]
        self._earn(place, usual)
        if shape != kept:
            took = view.seconds[shape] if seconds is None else seconds
            place.budget.pay(took - tokens * usual / view.tokens[kept], usual, drafting)
        place.budget.earn(usual)

    def _only_earns(self, batch_size: int, shape: Shape) -> bool:
        """Where costs are known, plain rounds tell nothing, and drafts that have stood for a while
        little. Where they stand, that is all there is to it for now: it may take the host as long
        to say so as to commit the round."""
        place = self._places.get(bucket(batch_size)) if self.costs.is_fixed else None
        if place is None or place.standing is None or place.standing.shape != shape:
            return False
        is_new = place.round - place.changed < self.policy.min_rounds
        if shape.num_steps and (is_new or self.prospects.is_mixed):
            return False
        place.unearned += 1
        return True

    def _earn(self, place: Place, usual: float) -> None:
        if place.unearned:
            place.budget.earn(usual, place.unearned)
            place.unearned = 0


def _like(kept: Shape, num_steps: int, view: Outlook) -> Shape:
    """Of another depth, as many nodes where that may be chosen."""
    alike = Shape(num_steps, kept.num_nodes)
    return alike if alike in view.rates else Shape(num_steps)
