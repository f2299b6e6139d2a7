"""How deep rounds on the device draft, and what is learned from those that are collected."""

from __future__ import annotations

from time import perf_counter

from specengine.core.parallel import Link
from specengine.core.request import Req
from specengine.core.spec import VerifyResult
from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.agree import agreed
from specengine.engine.adaptive.choose import DrafterPause
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.launched import Launched

_CONTEXT_EVERY = 16  # rounds, before one of which the requests' context lengths are looked at
_PAUSED_EVERY = 8  # rounds of a paused drafter, one of which is learned from


class RoundDepths:
    """Calls the chooser before each round, and passes the collected rounds on to it."""

    def __init__(
        self, chooser: DepthChooser | None, deepest: int, may_pause: bool, link: Link
    ) -> None:
        """chooser: None drafts as deep as there are rounds, which is `deepest`. may_pause: whether
        rounds can leave the drafter out. link: to other ranks, where rank 0 chooses."""
        self.chooser = chooser
        self.pause = DrafterPause() if chooser is not None and may_pause else None
        self._link = link
        self._deepest = DepthChoice(deepest, "as deep as there are graphs", None)
        self._num_choices = 0
        self._num_paused = 0
        self._kept: DepthChoice | None = None
        self._last: tuple[int, DraftShape] | None = None  # the last collected round's batch size

    def choose(self, reqs: list[Req]) -> tuple[DepthChoice, bool]:
        """What to draft, and whether the drafter stays paused."""
        chooser = self.chooser
        if chooser is None:
            return self._deepest, False
        return agreed(self._link, lambda: self._choose_by_costs(chooser, reqs))

    def keep(self, choice: DepthChoice | None) -> None:
        """For the next round, which could not follow. None: it is chosen anew."""
        self._kept = choice

    def forget_last(self) -> None:
        """What ran since the last collected round took time that is no round's."""
        self._last = None

    def learns_from(self, done: Launched) -> bool:
        """Called once for a round in flight, before the next one is launched."""
        if self.chooser is None or done.is_deeper:
            return False
        if done.paused:
            # All alike, and so many that learning from each would be most of what they cost.
            self._num_paused += 1
            if self._num_paused % _PAUSED_EVERY:
                return False
            self.chooser.skipped(len(done.in_flight.reqs), _PAUSED_EVERY - 1)
        # A round whose requests had all ended stayed in flight until new work came: its time and
        # its drafts mean nothing.
        return not all(req.is_finished for req in done.in_flight.reqs)

    def learn_host(self, done: Launched, following: Launched | None, since: float | None) -> None:
        """Learn how long the host was busy since it collected the last round, now that it waits for
        this one. Not where a request ended: that takes the host long at any depth, and the depth of
        a batch's last rounds would seem to be too much for it. since: when that was, by
        `perf_counter`; None where something else has run."""
        if self.chooser is None or since is None or self._last is None:
            return
        took, (size, shape) = perf_counter() - since, self._last
        reqs = done.in_flight.reqs
        # The next round was launched before the results were known; its requests are unfinished.
        go_on = following is not None and len(following.in_flight.reqs) == len(reqs)
        is_late = done.followed and not go_on and any(req.is_finished for req in reqs)
        if not is_late and (done.followed or len(reqs) >= size):
            self.chooser.observe_host(size, shape, took)

    def learn(self, done: Launched, result: VerifyResult, took: float | None) -> None:
        """took: seconds of the round; None where they are not the usual cost of such a round."""
        assert self.chooser is not None, "there is something that learns"
        in_flight, choice = done.in_flight, done.choice
        self.chooser.observe(
            RoundObservation(
                batch_size=len(in_flight.reqs),
                num_steps=choice.num_steps,
                num_drafted=result.num_drafted,
                num_accepted=result.num_accepted,
                num_nodes=choice.num_nodes,
                path_ranks=result.path_ranks,
                limits=done.limits,
                from_lookup=in_flight.plan.from_lookup,
                seconds=took,
                drafting_seconds=done.drafting,
            )
        )

    def collected(self, done: Launched, result: VerifyResult) -> None:
        """Note what was chosen for this round."""
        self._last = len(done.in_flight.reqs), done.choice.shape
        if self.chooser is not None:
            result.depth = done.choice

    def _choose_by_costs(self, chooser: DepthChooser, reqs: list[Req]) -> tuple[DepthChoice, bool]:
        batch_size = len(reqs)
        if self._num_choices % _CONTEXT_EVERY == 0:
            context = sum(req.kv_len for req in reqs) / batch_size
            if chooser.set_context_length(batch_size, context) and self.pause is not None:
                self.pause.resume()
        self._num_choices += 1
        if self.pause is not None:
            kept = chooser.kept(batch_size)
            if self.pause.is_paused(None if kept is None else kept.num_steps):
                assert kept is not None
                self._kept = None
                return kept, True
        if self._kept is not None:
            choice, self._kept = self._kept, None
            return choice, False
        return chooser.choose(batch_size), False
