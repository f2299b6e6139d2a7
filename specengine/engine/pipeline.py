"""Launches rounds on the device, where possible the next one before it waits for the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from specengine.core.batch import ForwardMode, ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.parallel import Link, NoLink
from specengine.core.request import Req
from specengine.core.spec import VerifyResult
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.background_capture import BackgroundCapture
from specengine.engine.draft_depth import depths_within, draft_within_limits
from specengine.engine.launched import Launched, RoundResult
from specengine.engine.lookup_prefetch import IndexAhead, LookupPrefetch
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound, RoundPlan
from specengine.engine.round_depths import RoundDepths
from specengine.scheduler.scheduler import Scheduler


class RoundPipeline:
    """Launches rounds and collects them.

    Between two calls at most one round is in flight. `collect` launches the next round, if it can,
    and then waits for the one in flight: two are in flight during that wait alone.

    The next round is launched by the first of these that can:

        method             when                          drafts              text of the last round
        _follow            before `collect` waits        a model's, or none  not known
        _follow_collected  after that wait               any                 known, not committed
        launch             no round is launched          any                 committed

    Drafts from lookup need that text, so `_follow` leaves their rounds out: where lookup drafts
    alone, it follows a round without drafts by another; where a model drafts too, also
    while no text can match. `_follow_collected` is for drafters that draft ahead (LookupPrefetch).
    """

    def __init__(
        self,
        executor: RoundExecutor,
        drafter: Drafter,
        scheduler: Scheduler,
        chooser: DepthChooser | None,
        overlaps: bool,
        link: Link | None = None,
    ) -> None:
        """drafter: of the whole engine. chooser, link: of RoundDepths. overlaps: whether rounds
        follow each other at all."""
        self.executor = executor
        self.drafter = drafter
        self.scheduler = scheduler
        self.overlaps = overlaps
        self.link = link or NoLink()
        self.depths = RoundDepths(chooser, executor.steps[-1], executor.may_pause, self.link)
        self.launched: Launched | None = None
        self.is_disturbed: Callable[[], bool] = lambda: False  # by prompts that run beside rounds
        self.background_capture = BackgroundCapture(executor, drafter)
        self._collected: float | None = None  # when the last round was, if nothing has run since
        # What drafts from text: the drafter itself, or the other half of a hybrid.
        self._lookup = drafter if drafter.drafts_on == "lookup" else drafter.lookup
        self._beside_model = drafter.lookup is not None
        self._index: IndexAhead | None = None
        self._prefetch: LookupPrefetch | None = None
        if self._lookup is not None:
            self._index = IndexAhead(self._lookup)
            if overlaps and self._lookup.drafts_ahead:
                cuts = executor.sampling.stochastic or self._beside_model
                self._prefetch = LookupPrefetch(self._lookup, scheduler, cuts)

    @property
    def has_in_flight(self) -> bool:
        return self.launched is not None

    def launch(self, batch: ScheduleBatch) -> None:
        """Launch a round of a batch. No round is in flight; `executor.can_run` was True for it."""
        started = perf_counter() if self._collected is None else self._collected
        choice, paused = self.depths.choose(batch.reqs)
        depth, drafting = choice.num_steps, 0.0
        plan = RoundPlan(depths_within(batch.reqs, depth), paused, choice.num_nodes)
        if self._lookup is not None and depth:
            start = perf_counter()
            proposal = draft_within_limits(self._lookup, batch, depth)
            plan = self.executor.source.send(proposal, plan.levels)
            drafting = perf_counter() - start
        captures = self.executor.counters["captures"]
        try:
            in_flight = self.executor.launch(batch.reqs, plan)
        except BaseException:
            self._forget_in_flight()
            raise
        if self.executor.counters["captures"] != captures:
            # The time of a capture is no round's.
            started, drafting = perf_counter(), 0.0
            self.depths.forget_last()
        self.launched = Launched(in_flight, choice, paused, False, started, drafting)

    def capture_while_idle(self, is_wanted: Callable[[], bool]) -> bool:
        """Capture one graph; there must be no work, and no round in flight. False: there is nothing
        left to capture. is_wanted: as BackgroundCapture.advance has it."""
        self._collected = None
        return self.background_capture.advance(is_wanted)

    def interrupt(self, prefill: ScheduleBatch | None = None) -> None:
        """Something else runs: the time until the next launch is no round's. prefill: its requests
        are given to the drafter's `begin`, those that decode along in it too; None: a round on the
        host, which the drafter observes."""
        self._collected = None
        self.depths.keep(None)  # it was chosen for the requests that ran
        self.executor.host_view.forget()
        if prefill is not None:
            self.executor.begin(prefill.prompt_reqs)
        if prefill is None or prefill.forward_mode is ForwardMode.MIXED:
            self.executor.resume()

    def collect(self) -> RoundResult:
        """Wait for the round in flight, the next already launched where it may be. The result must
        be committed, and then `send_masks` called, before anything else runs."""
        assert self.launched is not None
        try:
            return self._collect(self.launched)
        except BaseException:
            self._forget_in_flight()
            raise

    def _collect(self, done: Launched) -> RoundResult:
        in_flight = done.in_flight
        depth, learns = done.choice.num_steps, self.depths.learns_from(done)
        self.launched = self._follow(done) if self.overlaps else None
        if self._index is not None and not depth:
            self._index.advance(in_flight.reqs, lambda: self._is_done(in_flight))
        useful = self._useful_levels(in_flight) if depth else in_flight.plan.levels
        if learns and not self.is_disturbed():
            self.depths.learn_host(done, self.launched, self._collected)
        result = self.executor.collect(in_flight)
        self._collected = self.executor.collected_at
        if self.launched is not None:
            self.launched.started = self._collected
        elif self._prefetch is not None:
            self.launched = self._follow_collected(self._prefetch, in_flight, result.tokens)
        self.depths.collected(done, result)
        if learns:
            self.depths.learn(done, result, self._seconds_of(done))
        if useful != in_flight.plan.levels:
            result = replace(result, num_drafted=self._counted(in_flight, useful, result))
        return RoundResult(in_flight.reqs, result)

    def _seconds_of(self, done: Launched) -> float | None:
        """None where they are not the usual cost of such a round."""
        # With lookup, the first plain round after one with drafts does not follow: it is not
        # overlapped as the next ones are, and its time is no plain round's.
        is_usual = done.followed or done.choice.num_steps > 0 or self._lookup is None
        if self.is_disturbed() or (self.overlaps and not is_usual):
            return None
        return self.executor.collected_at - done.started

    def _forget_in_flight(self) -> None:
        """A round that is not read did not happen: its requests run it again."""
        self.launched = self._collected = None
        self.executor.host_view.forget()
        self.executor.sampling.edits.forget()
        if self._prefetch is not None:
            self._prefetch.forget()

    def _is_done(self, in_flight: InFlightRound) -> bool:
        """Whether the round has ended; False for several ranks, which must do the same."""
        return self.link.communicator.size == 1 and self.executor.is_done(in_flight)

    def send_masks(self) -> None:
        """To the round in flight, if it waits for them: its grammars follow what was committed."""
        if self.launched is not None:
            self.executor.send_masks(self.launched.in_flight)

    def _useful_levels(self, in_flight: InFlightRound) -> list[int]:
        """Levels of drafts that count: a graph drafts past the end of an output, and the host does
        not. A matched tree counts every node down to that depth; a round on the host would cut it
        to as many nodes as tokens are left. Requests are committed up to this round; called while
        it is in flight."""
        if self._lookup is not None and not self._beside_model:
            return in_flight.plan.levels
        reqs = in_flight.reqs
        left_B = self.scheduler.policy.left_after(reqs, [()] * len(reqs))
        return [
            count if left > count else max(left - 1, 0)
            for left, count in zip(left_B, in_flight.plan.levels, strict=True)
        ]

    def _counted(
        self, in_flight: InFlightRound, useful: list[int], result: VerifyResult
    ) -> list[int]:
        """Drafts of each request; of those that drafted past their end, as many as are useful."""
        drafts = self.executor.num_drafts(in_flight, useful)
        pairs = zip(useful, in_flight.plan.levels, strict=True)
        are_cut = [least < count for least, count in pairs]
        triples = zip(are_cut, drafts, result.num_drafted, strict=True)
        return [cut if is_cut else whole for is_cut, cut, whole in triples]

    def _waits_for_text(self, reqs: list[Req], in_flight: InFlightRound) -> bool:
        """Whether the drafts of requests that go on depend on what this round emits."""
        if self._lookup is None or not self._beside_model:
            return self._lookup is not None
        return self._lookup.may_match(reqs, in_flight.key.num_steps + 1)

    def _follow(self, before: Launched) -> Launched | None:
        """The round after one that was launched, of which nothing is known; None where its drafts
        need the text of that one, or it has no graph."""
        was_plain = before.choice.num_steps == 0
        if not was_plain and self._lookup is not None and not self._beside_model:
            return None
        reqs = self.scheduler.follow(before.in_flight.reqs, self._slots)
        if not reqs or (not was_plain and self._waits_for_text(reqs, before.in_flight)):
            return None
        choice, paused = self.depths.choose(reqs)
        if was_plain and choice.num_steps and self._waits_for_text(reqs, before.in_flight):
            self.depths.keep(choice)
            return None
        depth = choice.num_steps
        if self._beside_model:
            depth = min(depth, self.executor.source.model_steps)
        plan = RoundPlan(depths_within(reqs, depth), paused, choice.num_nodes)
        following = self.executor.follow(reqs, plan)
        if following is None:  # until there is a graph of it, which the next launch makes
            self.depths.keep(None if paused else choice)
            return None
        return Launched(following, choice, paused, True, perf_counter())

    def _follow_collected(
        self, prefetch: LookupPrefetch, before: InFlightRound, emitted: list[list[int]]
    ) -> Launched | None:
        """The round after one that is collected, and could not be followed before."""
        reqs = prefetch.follow(before.reqs, emitted, self._slots)
        if not reqs:
            return None
        (choice, _), drafting = self.depths.choose(reqs), 0.0
        plan = RoundPlan(depths_within(reqs, choice.num_steps))
        if choice.num_steps:
            start = perf_counter()
            proposal = prefetch.draft(reqs, plan.levels)
            plan = self.executor.source.send(proposal, plan.levels)
            drafting = perf_counter() - start
        following = self.executor.follow(reqs, plan)
        if following is None:  # until there is a graph of it
            self.depths.keep(choice)
            return None
        assert self._collected is not None
        return Launched(following, choice, False, False, self._collected, drafting)

    @property
    def _slots(self) -> int:
        """For the tokens of a round that is not committed, and those of the next."""
        return self.executor.most_tokens + self.executor.round_slots
