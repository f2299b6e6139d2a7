"""The rules by which a choice of depth and size is made, kept, probed and changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.costs import PLAIN, Costs
from specengine.engine.adaptive.estimate import Estimate

MIN_ROUNDS = 16  # between changes, and before rounds are learned from several at a time
_MARGIN = 0.03  # relative gain for which the shape is changed
_SURE = 1.25  # gain below which plain decoding is probed before anything else
_PROBE_EVERY = 2  # rounds, at least 2: one may be launched before the last is collected
_DEEP_TRIES = 2  # rounds at the start, where costs are learned
# Plain rounds at the start, and in each probe of plain decoding where costs are learned. They run
# in a row, since only a plain round after a plain one costs what plain decoding costs.
_PLAIN_TRIES = 4
PROBE_SHARE = 0.005  # of all time that probes may lose
_MOST_SAVED = 2.0  # rounds
_MOST_DEBT = 16.0  # rounds; earned back in 3,200
_PAUSED = 600  # rounds
_ACTIVE = 16


def decide(shape: DraftShape, estimate: Estimate) -> DepthChoice:
    """The decision for a shape, with the figures of an estimate."""
    gain = estimate.gain(shape)
    shown = shape if shape.num_steps else estimate.best_draft
    chances = " ".join(f"{chance:.2f}" for chance in estimate.chances[shown.num_nodes])
    reason = (
        f"batch {estimate.batch_size}: {shape}, {gain:.2f}x of none; acceptance {chances}"
        if shape.num_steps
        else f"batch {estimate.batch_size}: K=0, the best draft {shown} would be "
        f"{estimate.gain(shown):.2f}x of none; acceptance {chances}"
    )
    return DepthChoice(shape.num_steps, reason, gain, shape.num_nodes)


class ProbeBudget:
    """Seconds that may be lost on probes: a fixed share of all time. A probe that gains pays for
    the next one at once. Savings are bounded, and so is debt: no debt forbids probes for more than
    some thousand rounds."""

    def __init__(self) -> None:
        self.saved = 0.0
        self.pending = 0  # rounds that have run, for which nothing was earned yet

    def allows(self, loss: float, round_seconds: float) -> bool:
        """loss: expected; round_seconds: of a round without the probe."""
        return self.saved >= min(loss, _MOST_SAVED * round_seconds)

    def earn(self, round_seconds: float, rounds: int = 1) -> None:
        self._add(rounds * PROBE_SHARE * round_seconds, round_seconds)

    def earn_pending(self, round_seconds: float) -> None:
        if self.pending:
            self.earn(round_seconds, self.pending)
            self.pending = 0

    def pay(self, loss: float, round_seconds: float, drafting_seconds: float = 0.0) -> None:
        """loss: of a probe that has run; below 0 where it gained. drafting_seconds: its part spent
        on the host's drafting, which is charged in full. The rest may have another cause, and is
        charged up to what probes usually cost."""
        charged = min(loss - drafting_seconds, _MOST_SAVED * round_seconds)
        self._add(-drafting_seconds - charged, round_seconds)

    def _add(self, seconds: float, round_seconds: float) -> None:
        least, most = -_MOST_DEBT * round_seconds, _MOST_SAVED * round_seconds
        self.saved = max(least, min(self.saved + seconds, most))


@dataclass
class BucketState:
    """The state of the batch sizes up to a power of two."""

    kept: DepthChoice | None = None  # the choice until it is changed
    round: int = 0
    changed: int = 0  # round of the last change
    probed: int = 0  # round of the last probe
    last_probe: DraftShape | None = None
    plain_left: int = 0  # rounds that are left of a probe of plain decoding
    tries: Counter[DraftShape] = field(default_factory=Counter)  # at the start
    last_run: dict[DraftShape, int] = field(default_factory=dict)  # round
    budget: ProbeBudget = field(default_factory=ProbeBudget)
    final: Estimate | None = None  # by which nothing was to be changed or probed

    @property
    def kept_shape(self) -> DraftShape:
        assert self.kept is not None
        return self.kept.shape


class ChoicePolicy:
    """Keeps the kept shape until another is better by a margin, or plain decoding is better at
    all, and probes neighbouring shapes for a round each as the budget allows."""

    def __init__(self, steps: Sequence[int], costs: Costs) -> None:
        """steps: depths to choose from, ascending, 0 first."""
        self.steps = steps
        self.costs = costs
        self._deepest = DraftShape(steps[-1])
        self._tries = (self._deepest, _DEEP_TRIES), (PLAIN, _PLAIN_TRIES)

    def first_try(self, state: BucketState, batch_size: int) -> DepthChoice | None:
        """A round that measures a cost, where costs are to be learned and are not known yet."""
        for shape, count in self._tries:
            if state.tries[shape] < count:
                state.tries[shape] += 1
                reason = f"batch {batch_size}: measuring the cost of {shape}"
                return DepthChoice(shape.num_steps, reason, None)
        return None

    def choose(self, state: BucketState, batch_size: int, estimate: Estimate | None) -> DepthChoice:
        """estimate: None while costs are unknown."""
        if estimate is None:
            reason = f"batch {batch_size}: {self._deepest}, the cost of drafts is not known yet"
            return DepthChoice(self._deepest.num_steps, reason, None)
        decision = state.kept
        if decision is None:
            return self._change(state, estimate.best, estimate)
        kept = decision.shape
        if state.plain_left > 0 and kept != PLAIN:
            state.plain_left -= 1
            return self._probe(state, PLAIN, estimate)
        if state.final is estimate:
            return decision
        best = estimate.best
        wants = self._is_worth_it(kept, best, estimate)
        if wants and self.costs.is_reliable(batch_size, best):
            if state.round - state.changed < MIN_ROUNDS:
                return decision
            state.plain_left = 0
            return self._change(state, best, estimate)
        targets = [best] if wants else self._probe_targets(kept, estimate)
        if not targets:
            state.final = estimate
        if not targets or state.round - state.probed < _PROBE_EVERY:
            return decision
        target = self._next_probe(state, targets, estimate)
        if not self._may_probe(state, target, estimate, wants):
            return decision
        if target == PLAIN and not self.costs.is_fixed:
            state.plain_left = _PLAIN_TRIES - 1
        return self._probe(state, target, estimate)

    def _change(self, state: BucketState, shape: DraftShape, estimate: Estimate) -> DepthChoice:
        state.kept, state.changed = decide(shape, estimate), state.round
        return state.kept

    def _probe(self, state: BucketState, target: DraftShape, estimate: Estimate) -> DepthChoice:
        state.probed, state.last_probe = state.round, target
        tried = f"{target} tried for a round; {state.kept_shape} is kept"
        reason = f"batch {estimate.batch_size}: {tried}"
        return DepthChoice(target.num_steps, reason, estimate.gain(target), target.num_nodes)

    def _is_worth_it(self, kept: DraftShape, best: DraftShape, estimate: Estimate) -> bool:
        if best == kept:
            return False
        least = (1 + _MARGIN) * estimate.rates[kept]
        return estimate.rates[best] > least or estimate.gain(kept) < 1

    def _next_probe(
        self, state: BucketState, targets: Sequence[DraftShape], estimate: Estimate
    ) -> DraftShape:
        """The target that has not run for the longest time; plain decoding every other time where
        the gain over it is small."""
        is_unsure = estimate.gain(state.kept_shape) < _SURE
        if is_unsure and PLAIN in targets and state.last_probe != PLAIN:
            return PLAIN
        return min(targets, key=lambda shape: state.last_run.get(shape, 0))

    def _may_probe(
        self, state: BucketState, target: DraftShape, estimate: Estimate, wants: bool
    ) -> bool:
        """wants: whether the target is to replace the kept shape."""
        kept = state.kept_shape
        usual = estimate.seconds[kept]
        loss = estimate.seconds[target] - estimate.tokens[target] * usual / estimate.tokens[kept]
        state.budget.earn_pending(usual)
        # What seems better by the margin, and plain decoding that seems better at all, need no
        # budget: each try that disappoints lowers the estimate.
        if loss < 0 and (wants or target == PLAIN):
            return True
        return state.budget.allows(loss, usual)

    def _probe_targets(self, kept: DraftShape, estimate: Estimate) -> list[DraftShape]:
        """The next depth and the next size, of which rounds of the kept shape show nothing, and
        those shapes below them, whose acceptance is known, that have no reliable cost."""
        index = self.steps.index(kept.num_steps)
        same = [one for one in estimate.rates if one.num_steps == kept.num_steps]
        size = same.index(kept)
        deeper = self.steps[index + 1 : index + 2]
        above = [_of_depth(depth, kept, estimate) for depth in deeper]
        above += same[size + 1 : size + 2]
        if self.costs.is_fixed:
            return above
        shallower = _of_depth(self.steps[max(index - 1, 0)], kept, estimate)
        below = [PLAIN, shallower, *same[:size]]
        below += [one for one in estimate.rates if one.num_steps in deeper and one.num_nodes]
        others = [one for one in dict.fromkeys(below) if one not in {*above, kept}]
        batch_size = estimate.batch_size
        return [*above, *(one for one in others if not self.costs.is_reliable(batch_size, one))]


def _of_depth(num_steps: int, kept: DraftShape, estimate: Estimate) -> DraftShape:
    """The shape of this depth with as many nodes, where there is one; else the whole one."""
    alike = DraftShape(num_steps, kept.num_nodes)
    return alike if alike in estimate.rates else DraftShape(num_steps)


class DrafterPause:
    """Pauses a drafter of hidden states while plain decoding is the kept choice. To be able to
    draft in the next round it observes every round, for 3 to 6% of a plain round's time. Paused, it
    observes none. It is active again for a few rounds at a time, in which drafts are probed, and
    then drafts from the tokens since it became active.
    """

    def __init__(self, paused: int = _PAUSED, active: int = _ACTIVE) -> None:
        """Rounds of each in turn."""
        self.paused = paused
        self.active = active
        self._rounds = 0  # since plain decoding is the kept choice

    def is_paused(self, kept_steps: int | None) -> bool:
        """Whether the next round is paused; call it once a round. kept_steps: num_steps of the kept
        choice."""
        if kept_steps != 0:
            self._rounds = 0
            return False
        place = self._rounds % (self.paused + self.active)
        self._rounds += 1
        return place < self.paused

    def resume(self) -> None:
        """Be active from the next round on."""
        place = self._rounds % (self.paused + self.active)
        if place < self.paused:
            self._rounds += self.paused - place
