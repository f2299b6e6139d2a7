"""The class that chooses before each round, and observes the round after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from specengine.core.request import Req
from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.acceptance import Acceptance, HybridAcceptance, RoundObservation
from specengine.engine.adaptive.choose import MIN_ROUNDS, BucketState, ChoicePolicy, decide
from specengine.engine.adaptive.costs import PLAIN, Costs, RunningCosts, bucket
from specengine.engine.adaptive.estimate import Estimate, Estimator, HostSeconds, all_shapes


class DepthChooser:
    """Chooses the depth of drafts, and of trees their size, round by round. Call `choose` before a
    round is launched and `observe` after it was collected, in the order of launching; the next
    round may be launched in between.

    It maximises batch * E(K) / seconds(batch, K), where E(K) = 1 + the sum over i <= K of the
    product of the first i chances of acceptance: the tokens that a round of depth K emits
    (Leviathan et al. 2023, section 3). K = 0, plain decoding, is one of the choices. Where the
    drafter ranks the nodes of its trees, smaller trees of a depth are choices too.

    Each bucket of batch sizes has a current choice and a budget of probes of its own: time lost at
    one does not keep another from its best choice. The choice depends on outcomes and times of past
    rounds alone, so it biases no sampled draft.
    """

    def __init__(
        self,
        steps: Sequence[int],
        costs: Costs | None = None,
        sizes: Mapping[int, Sequence[int]] | None = None,
        host: HostSeconds | None = None,
        model_steps: int | None = None,
        pads: bool = False,
    ) -> None:
        """steps: depths to choose from. costs: None to learn them from the rounds. sizes: nodes of
        cut trees by depth, root included. host: beside costs that are the device's alone.
        model_steps: the depth of a model beside lookup, None with one source of drafts. pads: a
        round costs as if all requests drafted as deep as the deepest."""
        self.steps = sorted({0, *steps})
        self.sizes = sizes or {}
        self.shapes = all_shapes(self.steps, self.sizes)
        self.costs = RunningCosts() if costs is None else costs
        self.host = host
        known = sorted({one.num_nodes for one in self.shapes if one.num_nodes is not None})
        self.acceptance: Acceptance | HybridAcceptance = Acceptance(self.steps[-1], known)
        if model_steps is not None:
            self.acceptance = HybridAcceptance(self.steps[-1], model_steps, known, pads)
        self.estimator = Estimator(self.shapes, self.costs, self.acceptance, host, pads)
        self._policy = ChoicePolicy(self.steps, self.costs)
        self._buckets: dict[int, BucketState] = {}  # by batch size; a bucket's sizes share one
        self._batch_size = 0  # of the last choice
        self._last: DepthChoice | None = None

    def choose(self, batch_size: int) -> DepthChoice:
        """Choose the depth of the next round of so many requests."""
        state = self._bucket(batch_size)
        state.round += 1
        decision = None
        if not self.costs.is_given(batch_size):
            decision = self._policy.first_try(state, batch_size)
        if decision is None:
            decision = self._policy.choose(state, batch_size, self.estimator.of(batch_size))
        state.last_run[decision.shape] = state.round
        self._batch_size, self._last = batch_size, decision
        return decision

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a round."""
        state, has_drafts = self._bucket(observation.batch_size), observation.num_steps > 0
        if self._is_routine(state, observation):
            state.budget.pending += 1
            if has_drafts:
                self.estimator.buffer(observation)
            return
        if has_drafts:
            self.estimator.observe(observation)
        if not self.costs.is_fixed:
            self._learn_cost(observation)
        self._account(state, observation)

    def observe_host(self, batch_size: int, shape: DraftShape, seconds: float) -> None:
        """seconds: from the collection of a round of this shape until the host had nothing to do
        but to wait for the next one."""
        if self.host is not None and self.host.record(batch_size, shape, seconds):
            self.estimator.costs_changed()

    def set_context_length(self, batch_size: int, tokens: float) -> bool:
        """Tell the mean context length of the requests of the next rounds. Returns whether costs
        change by it, and drafts pay with the new ones."""
        if not self.costs.set_context_length(tokens):
            return False
        self.estimator.costs_changed()
        found = self.estimator.of(batch_size)
        return found is not None and found.best != PLAIN

    def skipped(self, batch_size: int, rounds: int) -> None:
        """So many rounds of the kept shape, without drafts, have run and are not observed."""
        self._bucket(batch_size).budget.pending += rounds

    def kept(self, batch_size: int) -> DepthChoice | None:
        """The choice that is kept for such batches; None before the first choice by estimate."""
        return self._bucket(batch_size).kept

    def resolved(self, choice: DepthChoice) -> DepthChoice:
        """The choice with the current figures, if it is the current choice for the last round's
        batch size; else unchanged."""
        if self._batch_size and self.kept(self._batch_size) is choice:
            self.estimator.flush()
            return self._with_figures(self.estimator.of) or choice
        return choice

    @property
    def current(self) -> DepthChoice | None:
        """The current choice for the batch size of the last round, with figures that are a few
        rounds old at most; without one, the last choice; None before the first round. Any thread
        may read it."""
        return self._with_figures(self.estimator.peek)

    def _with_figures(self, estimate_of: Callable[[int], Estimate | None]) -> DepthChoice | None:
        batch_size = self._batch_size
        state = self._buckets.get(batch_size)
        if state is None or state.kept is None:
            return self._last
        estimate = estimate_of(batch_size)
        return state.kept if estimate is None else decide(state.kept.shape, estimate)

    def _bucket(self, batch_size: int) -> BucketState:
        state = self._buckets.get(batch_size)
        if state is None:
            state = self._buckets.setdefault(bucket(batch_size), BucketState())
            self._buckets[batch_size] = state
        return state

    def _is_routine(self, state: BucketState, observation: RoundObservation) -> bool:
        """Whether nothing must be learned from the round now: costs are known, it had the kept
        shape, and is plain or has been kept for a while. Work of the host here adds to the time of
        every round."""
        kept = state.kept
        if kept is None or not self.costs.is_fixed:
            return False
        if kept.num_steps != observation.num_steps:
            return False
        if kept.num_nodes != observation.num_nodes:
            return False
        is_new = state.round - state.changed < MIN_ROUNDS
        return not observation.num_steps or not (is_new or self.acceptance.is_hybrid)

    def _learn_cost(self, one: RoundObservation) -> None:
        if one.seconds is not None:
            levels = sum(self.acceptance.levels(one)) if one.num_steps else 0
            self.costs.record(one.batch_size, one.num_steps, levels, one.seconds, one.num_nodes)
            self.estimator.costs_changed()

    def _account(self, state: BucketState, one: RoundObservation) -> None:
        """The budget earns from every round, and pays for one that had not the kept shape."""
        estimate = self.estimator.of(one.batch_size)
        if state.kept is None or estimate is None:
            return
        kept, shape = state.kept.shape, DraftShape(one.num_steps, one.num_nodes)
        usual = estimate.seconds[kept]
        state.budget.earn_pending(usual)
        if shape != kept:
            took = estimate.seconds[shape] if one.seconds is None else one.seconds
            tokens = 1 + sum(one.num_accepted) / one.batch_size  # of a request
            loss = took - tokens * usual / estimate.tokens[kept]
            state.budget.pay(loss, usual, one.drafting_seconds)
        state.budget.earn(usual)


def tell_depths(ended: Iterable[Req], choosers: Sequence[DepthChooser]) -> None:
    """What depths requests that have ended were drafted for: once for all that ended under the same
    choice, since text is costly."""
    resolved: dict[int, DepthChoice] = {}  # by identity; `choices` keeps them alive
    choices = [(req, req.spec.depth) for req in ended]
    for req, choice in choices:
        if choice is None:
            continue
        if id(choice) not in resolved:
            found = choice
            for chooser in choosers:
                found = chooser.resolved(found)
            resolved[id(choice)] = found
        req.spec.depth = resolved[id(choice)]
