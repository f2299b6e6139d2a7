"""Rounds in the air: launched on the device, and not read yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from specengine.core.batch import ForwardMode, ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import AheadDrafter, Drafter, TextDrafter, VerifyResult
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.choose import Decision, DrafterPause
from specengine.engine.adaptive.costs import DraftShape
from specengine.engine.adaptive.state import AdaptiveSteps
from specengine.engine.draft_depth import depths_within, draft_within_limits
from specengine.engine.graph_round import GraphRound
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.hybrid_drafts import MixedDrafts
from specengine.engine.idle_captures import IdleCaptures
from specengine.engine.round_form import Flight, Wish
from specengine.engine.text_ahead import TextAhead
from specengine.engine.text_study import TextStudy
from specengine.scheduler.scheduler import Scheduler

_READ_OF = 16  # rounds, before one of which it is asked how much text requests have
_LEARNT_OF = 8  # rounds that the drafter sleeps through, from one of them


class Landing(NamedTuple):
    reqs: list[Req]
    result: VerifyResult


class Flights:
    """Launches rounds, lets the next one follow before the last has landed, and lands them.

    depths: how deep to draft, by what it costs and earns; None drafts as deep as there are graphs.
    A drafter on the device follows at any depth. One that reads text needs the last round's tokens
    before it drafts, so that only rounds without drafts follow unseen; those of drafters that draft
    ahead follow when the last has landed, before it is committed (TextAhead). A model beside text
    drafts unseen, too, where no text can have a match long enough by then.
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
        self.idle_captures = IdleCaptures(graph_round, drafter)
        self.pause = DrafterPause() if depths is not None and graph_round.may_sleep else None
        self._deepest = Decision(graph_round.steps[-1], "as deep as there are graphs", None)
        self._choice = self._deepest  # of the flight
        self._asleep = False  # nor does its drafter look at it
        self._slept = 0  # rounds
        self._chosen_times = 0
        self._followed = False  # whether the flight was launched before the last one had landed
        self._chosen: Decision | None = None  # for the next one, where it could not follow
        self._landed: float | None = None  # when the last one did, if nothing else has run since
        self._since = 0.0  # when the time of the flight began
        self._before: tuple[int, DraftShape] | None = None  # what landed last, by batch size
        self._drafting = 0.0  # seconds of it, on the host
        self._study: TextStudy | None = None
        self._ahead: TextAhead | None = None
        drafts = graph_round.drafter
        self._drafts = drafts if isinstance(drafts, HostDrafter) else None
        self._hybrid = drafts if isinstance(drafts, MixedDrafts) else None
        self._reader = drafter if self._hybrid is None else self._hybrid.reader
        if self._reads_text and isinstance(self._reader, TextDrafter):
            self._study = TextStudy(self._reader)
        if self._reads_text and overlaps and isinstance(self._reader, AheadDrafter):
            cuts = graph_round.choices.weighs or self._hybrid is not None
            ahead = TextAhead(self._reader, scheduler, cuts)
            self._ahead = ahead if self._reader.drafts_ahead else None

    @property
    def _reads_text(self) -> bool:
        return self._drafts is not None

    @property
    def in_the_air(self) -> bool:
        return self.flight is not None

    def launch(self, batch: ScheduleBatch) -> None:
        """Fly a batch of the kind that graph_round.can_run says yes to."""
        self._since = perf_counter() if self._landed is None else self._landed
        self._choice = self._choose(batch.reqs)
        depth = self._choice.num_steps
        wish = Wish(depths_within(batch.reqs, depth), self._asleep, self._choice.num_nodes)
        self._drafting = 0.0
        if self._drafts is not None and depth:
            start = perf_counter()
            proposal = draft_within_limits(self._reader, batch, depth)
            wish = self._drafts.set_beside(proposal, wish.num_drafted)
            self._drafting = perf_counter() - start
        captures, self._followed = self.graph_round.counters["captures"], False
        with self._all_or_nothing():
            self.flight = self.graph_round.launch(batch.reqs, wish)
        if self.graph_round.counters["captures"] != captures:
            # Capturing is no round's time.
            self._since, self._drafting, self._before = perf_counter(), 0.0, None

    def prepare(self) -> bool:
        """While there is no work, and nothing in the air: whether it may be called again."""
        self._landed = None
        return self.idle_captures.go_on()

    def interrupt(self, prefill: ScheduleBatch | None = None) -> None:
        """Something else runs: the time until the next launch is no round's. prefill: the drafter
        reads prompts in it, and looks at what runs along; None: a round, at which it looks."""
        self._landed = self._chosen = None  # it was chosen for those that ran
        self.graph_round.known.forget()
        if prefill is not None:
            self.graph_round.read_anew(prefill.prompt_reqs)
        if prefill is None or prefill.forward_mode is ForwardMode.MIXED:
            self.graph_round.wake()

    def land(self) -> Landing:
        """Wait for the flight, the next already on its way where it may be. Its outcome must be
        committed, and then `send_masks` called, before anything else runs."""
        flight, choice, since, drafting = self.flight, self._choice, self._since, self._drafting
        assert flight is not None
        depth, tells, followed = choice.num_steps, self._tells(flight), self._followed
        is_usual = followed or depth > 0 or not self._reads_text
        with self._all_or_nothing():
            self.flight = self._follow(flight) if self.overlaps else None
            if self._study is not None and not depth:
                self._study.go_on(flight.reqs, lambda: self.graph_round.has_landed(flight))
            useful = self._useful_levels(flight) if depth else flight.num_drafted
            if tells:
                self._tell_host(flight, followed)
            result = self.graph_round.land(flight)
        self._landed = self._since = landed = self.graph_round.landed_at
        if self._ahead is not None and self.flight is None:
            with self._all_or_nothing():
                self.flight = self._follow_landed(self._ahead, flight, result.tokens)
        self._before = len(flight.reqs), choice.shape
        if self.depths is not None:
            result.depth = choice
        if self.depths is not None and tells:
            # Plain rounds overlap: the first of them tells nothing of what they cost.
            took = landed - since if is_usual or not self.overlaps else None
            observation = RoundObservation(
                len(flight.reqs),
                depth,
                result.num_drafted,
                result.num_accepted,
                choice.num_nodes,
                result.path_ranks,
                _limits(flight, depth),
                flight.of_text,
                took,
                drafting,
            )
            self.depths.observe(observation)
        if useful != flight.num_drafted:
            result = replace(result, num_drafted=self._counted(flight, useful, result))
        return Landing(flight.reqs, result)

    def _tells(self, flight: Flight) -> bool:
        """Whether something is to be learned from a round. Asked before the next is launched."""
        if self.depths is None:
            return False
        if self._asleep:
            # All alike, and so many of them that learning would be what they cost more than others.
            self._slept += 1
            if self._slept % _LEARNT_OF:
                return False
            self.depths.skipped(len(flight.reqs), _LEARNT_OF - 1)
        # Where all have ended, it was in the air until somebody came, and drafted past the end.
        return not all(req.is_finished for req in flight.reqs)

    def _tell_host(self, flight: Flight, followed: bool) -> None:
        """How long it had to do for the round that landed last, now that it waits for this one.
        Where somebody ended there, it has as much to do whatever was drafted: the last rounds of a
        batch would tell of their depth that the host cannot keep up with it, for good."""
        if self.depths is None or self._landed is None or self._before is None:
            return
        took, (size, shape) = perf_counter() - self._landed, self._before
        # What follows was launched before anybody knew; whoever follows that has not ended.
        go_on = self.flight is not None and len(self.flight.reqs) == len(flight.reqs)
        is_late = followed and not go_on and any(req.is_finished for req in flight.reqs)
        if not is_late and (followed or len(flight.reqs) >= size):
            self.depths.observe_host(size, shape, took)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A round that nobody reads did not happen: whoever goes on flies it again."""
        try:
            yield
        except BaseException:
            self.flight = self._landed = None
            self.graph_round.known.forget()
            self.graph_round.choices.edits.forget()
            if self._ahead is not None:
                self._ahead.forget()
            raise

    def send_masks(self) -> None:
        """To the flight, where it waits for them: a grammar goes on from what landed last."""
        if self.flight is not None:
            self.graph_round.send_masks(self.flight)

    def _useful_levels(self, flight: Flight) -> list[int]:
        """Of its drafts. Where an output ends, a graph drafts past it. The host would not, so that
        is not counted. Requests are committed up to this round; it is asked while that flies."""
        if self._reads_text and self._hybrid is None:
            return flight.num_drafted
        left_B = self.scheduler.policy.left_after(flight.reqs, [()] * len(flight.reqs))
        return [
            count if left > count else max(left - 1, 0)
            for left, count in zip(left_B, flight.num_drafted, strict=True)
        ]

    def _counted(self, flight: Flight, useful: list[int], result: VerifyResult) -> list[int]:
        """Drafts of each request, of those that drafted past their end as many as are useful."""
        drafts = self.graph_round.num_drafts(flight, useful)
        pairs = zip(useful, flight.num_drafted, strict=True)
        are_cut = [least < count for least, count in pairs]
        triples = zip(are_cut, drafts, result.num_drafted, strict=True)
        return [cut if is_cut else whole for is_cut, cut, whole in triples]

    def _waits_for_text(self, reqs: list[Req], flight: Flight) -> bool:
        """Whether drafts for those that go on depend on what the flight says."""
        if self._hybrid is None:
            return self._reads_text
        return self._hybrid.reader.may_match(reqs, flight.form.num_steps + 1)

    def _follow(self, flight: Flight) -> Flight | None:
        was_plain = self._choice.num_steps == 0
        if not was_plain and self._reads_text and self._hybrid is None:
            return None
        reqs = self.scheduler.follow(flight.reqs, self._slots)
        if not reqs or (not was_plain and self._waits_for_text(reqs, flight)):
            return None
        choice = self._choose(reqs)
        if was_plain and choice.num_steps and self._waits_for_text(reqs, flight):
            self._chosen = choice
            return None
        depth, self._drafting = choice.num_steps, 0.0
        if self._hybrid is not None:
            depth = min(depth, self._hybrid.model_steps)
        wish = Wish(depths_within(reqs, depth), self._asleep, choice.num_nodes)
        following = self.graph_round.follow(reqs, wish)
        if following is None:  # until there is a graph of it, which the next launch makes
            self._chosen = None if self._asleep else choice
            return None
        self._choice, self._followed = choice, True
        return following

    def _follow_landed(
        self, ahead: TextAhead, flight: Flight, said: list[list[int]]
    ) -> Flight | None:
        """Of rounds that could not follow the flight before it had landed."""
        reqs = ahead.follow(flight.reqs, said, self._slots)
        if not reqs:
            return None
        choice, self._drafting = self._choose(reqs), 0.0
        wish = Wish(depths_within(reqs, choice.num_steps))
        if choice.num_steps:
            start = perf_counter()
            assert self._drafts is not None
            wish = self._drafts.set_beside(ahead.draft(reqs, choice.num_steps), wish.num_drafted)
            self._drafting = perf_counter() - start
        following = self.graph_round.follow(reqs, wish)
        if following is None:  # until there is a graph of it
            self._chosen = choice
            return None
        self._choice, self._followed = choice, False
        return following

    @property
    def _slots(self) -> int:
        """For the tokens of a round that is not committed, and those of the next."""
        return self.graph_round.num_nodes + self.graph_round.num_slots

    def _choose(self, reqs: list[Req]) -> Decision:
        self._asleep, batch_size = False, len(reqs)
        if self.depths is None:
            return self._deepest
        if self._chosen_times % _READ_OF == 0:
            text = sum(req.kv_len for req in reqs) / batch_size
            if self.depths.set_context_length(batch_size, text) and self.pause is not None:
                self.pause.resume()
        self._chosen_times += 1
        if self.pause is not None:
            standing = self.depths.standing(batch_size)
            if self.pause.is_paused(None if standing is None else standing.num_steps):
                assert standing is not None
                self._asleep, self._chosen = True, None
                return standing
        if self._chosen is not None:
            choice, self._chosen = self._chosen, None
            return choice
        return self.depths.choose(batch_size)


def _limits(flight: Flight, depth: int) -> list[int]:
    """The most levels of each request: nodes do not tell those of trees, nor what is counted those
    of chains, whose padding is a draft where it stood."""
    if flight.drafted_nodes is not None:
        return depths_within(flight.reqs, depth)
    return flight.num_drafted
