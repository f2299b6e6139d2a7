"""How many layers of a split prompt run at a time, and on which share of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine.scheduler.split_measures import Mean, RecentRounds

# How much longer a token may take is used up to this part: rounds differ.
_MARGIN = 0.9
# A prompt with no other behind it may take so many times what it takes alone.
PROMPT_RATIO = 1.4
# Seconds over which rounds are held to the ratio: what answers take, at least and at most.
_LEAST, _MOST = 0.05, 4.0
# Measurements of a share that do not count: the first ones allocate its memory, which waits for the
# device. On an H100 they said ten times what later ones do.
_FIRST = 2
# Rounds after which what was measured of a share is forgotten, so that it is tried again.
_KEPT = 10_000
# Calls after which a share is given up until then, if rounds beside it could not be measured.
_MOST_TRIES = 8
# A share is used in place of turns where prompts and rounds together do so much more than in turns.
_WORTH = 1.05
# Rounds of an answer's time that took no longer than this bear a layer, however long it takes: no
# prompt waits for ever, nor for a first call that compiled kernels.
_UNDELAYED = 1.01
# In turns a prompt is to take so many times what it takes alone. It waits for a round before, too.
_TURNS_RATIO = 1.3
# By how much of a share rounds beside it become slower, where nothing was measured yet.
_UNSEEN_SLOWDOWN = 1.0
# Calls of a prompt, where no round was measured that a call could last as long as.
_UNSEEN_CALLS = 8


@dataclass(frozen=True)
class PromptQueue:
    """What of prompts is left to be done. num_tokens, layers_left: of the forward that is next.
    num_waiting_tokens: of all others, split or not yet begun."""

    num_tokens: int
    layers_left: int
    num_waiting_tokens: int = 0


@dataclass(frozen=True)
class SplitDecision:
    """layers: of the next call; 0: none before the next round. share: of the device's SMs, beside
    rounds; None is all of them, in turns with rounds."""

    layers: int
    share: float | None
    reason: str


@dataclass
class SplitPrefillPolicy:
    """Decides from what was measured: seconds a round takes without and beside prompts, seconds a
    layer of a prompt takes a token, on each share.

    Tokens may take `tpot_ratio` times as long beside prompts, over the time that an answer takes: a
    prompt now and then is given much, prompts without end are given what rounds bear for good.

    In turns all that runs has the whole device, so that prompts and rounds together do what one of
    them alone would. A share is worth its SMs only where the two together do more.

    num_layers: of the model. shares: that prompts can have beside rounds, ascending. tpot_ratio:
    how many times as long a token may take beside prompts. layers: fixed, or None. turns: prompts
    may take turns with rounds; they always do where there are no shares.
    """

    num_layers: int
    shares: Sequence[float] = ()
    tpot_ratio: float = 1.5
    layers: int | None = None
    turns: bool = True
    _rounds: dict[int, Mean] = field(default_factory=dict)  # seconds, by batch sizes doubled
    _slowdowns: dict[float, Mean] = field(default_factory=dict)  # of rounds, by share
    _layers: dict[float | None, Mean] = field(default_factory=dict)  # seconds a layer and token
    _answers: Mean = field(default_factory=Mean)  # seconds
    _lately: RecentRounds = field(default_factory=RecentRounds)
    _num_rounds: int = 0

    def saw_round(
        self,
        batch_size: int,
        seconds: float,
        beside: SplitDecision | None = None,
        delay: float = 0.0,
    ) -> None:
        """seconds: from a round's end to the next one's, but for the delay by what took turns with
        it. beside: what ran beside it all the same."""
        self._num_rounds += 1
        self._forget()
        if beside is None:
            self._rounds.setdefault(_bucket(batch_size), Mean()).add(seconds)
        alone = self._alone(batch_size)
        if alone is None:
            return
        if beside is not None and beside.share is not None:
            seen = self._slowdowns.setdefault(beside.share, Mean(skips=_FIRST))
            seen.add(seconds / alone, self._num_rounds)
        self._lately.add(seconds + delay, seconds if beside is None else alone)

    def saw_delay(self, seconds: float) -> None:
        """What prompts took while the time between two rounds was no round's."""
        self._lately.add(seconds, 0.0)

    def saw_answer(self, seconds: float) -> None:
        """From a request's first token to its last. The longer the heavier: what is wanted is the
        answer that most tokens belong to."""
        before = self._answers.value
        self._answers.add(seconds, weight=min(1.0, seconds / before) if before else 1.0)
        assert self._answers.value is not None
        self._lately.seconds = min(max(self._answers.value, _LEAST), _MOST)

    def saw_layers(self, call: SplitDecision, num_tokens: int, seconds: float) -> None:
        """How long a call took."""
        cost = seconds / (call.layers * num_tokens)
        skips = 0 if call.share is None else _FIRST
        seen = self._layers.setdefault(call.share, Mean(skips=skips, falls=True))
        seen.add(cost, self._num_rounds)

    def decide(self, queue: PromptQueue, batch_size: int) -> SplitDecision:
        """batch_size: requests that run. With none, the prompt has the device to itself."""
        if not batch_size:
            return self._call(queue, queue.layers_left, None, "no round runs")
        shares = self._useful_shares(queue, batch_size)
        if not shares:
            return self._take_turns(queue, batch_size)
        share, reason = self._share(queue, shares)
        took = self._layer_seconds(queue.num_tokens, share)
        alone = self._alone(batch_size)
        if took is None or alone is None:
            return self._call(queue, self._unseen, share, reason)
        layers = math.ceil(alone * self.slowdown(share) / took)  # a call lasts as long as a round
        return self._call(queue, layers, share, reason)

    def slowdown(self, share: float) -> float:
        """Of rounds beside prompts on that share, as measured; else as at the nearest one that was,
        in proportion."""
        found = ((one, mean.value) for one, mean in self._slowdowns.items())
        seen = {one: value for one, value in found if one is not None and value is not None}
        if not seen:
            return 1.0 + _UNSEEN_SLOWDOWN * share * (self.tpot_ratio - 1.0)
        nearest = min(seen, key=lambda one: abs(one - share))
        return 1.0 + max(0.0, seen[nearest] - 1.0) * share / nearest

    def both_together(self, share: float) -> float | None:
        """What prompts on a share and rounds beside them do together, in times of what they would
        do in turns; None before it was measured."""
        here, whole = (self._layers.get(one, Mean()).value for one in (share, None))
        slowdown = self._slowdowns.get(share, Mean()).value
        if here is None or whole is None or slowdown is None:
            return None
        return whole / here + 1.0 / slowdown

    def _useful_shares(self, queue: PromptQueue, batch_size: int) -> Sequence[float]:
        """One that is to be measured, or those that are better than turns: none where turns are."""
        if not self.turns or not self.shares:
            return self.shares
        knows_turns = self._layer_seconds(queue.num_tokens, None) is not None
        if not knows_turns or self._alone(batch_size) is None:
            return ()
        together = {one: self.both_together(one) for one in self.shares}
        untried = [one for one, value in together.items() if value is None and self._may_try(one)]
        if untried and self._lately.ratio <= self._limit:
            return untried[:1]
        return [one for one, value in together.items() if value is not None and value > _WORTH]

    def _may_try(self, share: float) -> bool:
        return self._layers.get(share, Mean()).count < _MOST_TRIES

    def _take_turns(self, queue: PromptQueue, batch_size: int) -> SplitDecision:
        """As many layers as the prompt needs: more would end it little earlier, and lengthen the
        gaps between tokens. Or as many as rounds bear until all prompts have run; or, where they
        come without end, one now and then."""
        took, alone = self._layer_seconds(queue.num_tokens, None), self._alone(batch_size)
        if self.layers is not None or took is None or alone is None:
            return self._call(queue, 1, None, "in turns: nothing measured yet")
        needed = math.ceil(alone / ((_TURNS_RATIO - 1.0) * took))
        for layers in range(min(needed, queue.layers_left), 0, -1):
            turn = alone + layers * took
            seconds = queue.layers_left / layers * turn * _times(queue)
            if self._lately.after(seconds, turn / alone) <= self._limit:
                reason = "as many as" if layers < needed else "fast enough for the prompt, and"
                return self._call(queue, layers, None, f"in turns: {reason} rounds bear")
        is_borne = self._lately.after(alone + took, 1.0 + took / alone) <= self._limit
        if is_borne or self._lately.ratio < _UNDELAYED:
            return self._call(queue, 1, None, "in turns: rounds bear no more for long")
        return SplitDecision(0, None, "in turns: rounds bear no more now")

    def _share(self, queue: PromptQueue, shares: Sequence[float]) -> tuple[float, str]:
        """The largest that rounds bear, or a smaller one that serves the prompt well enough."""
        borne = [one for one in shares if self._after(queue, one) <= self._limit]
        if not borne:
            return shares[0], "the smallest share: rounds bear none"
        if queue.num_waiting_tokens:
            return borne[-1], "the largest share that rounds bear: prompts wait"
        for one in borne:
            if self._prompt_ratio(one) <= PROMPT_RATIO:
                return one, "the smallest share that is fast enough for the prompt"
        return borne[-1], "the largest share that rounds bear"

    def _forget(self) -> None:
        """What was measured of shares long ago. Turns are measured whenever there are prompts."""
        shares = [mean for share, mean in self._layers.items() if share is not None]
        for mean in (*self._slowdowns.values(), *shares):
            mean.forget_before(self._num_rounds - _KEPT)

    def _after(self, queue: PromptQueue, share: float) -> float:
        """How many times as long tokens will have taken, once all prompts have run on a share."""
        took = self._layer_seconds(queue.num_tokens, share)
        if took is None:
            return self.slowdown(share)
        seconds = queue.layers_left * took * _times(queue)
        return self._lately.after(seconds, self.slowdown(share))

    @property
    def _limit(self) -> float:
        return 1.0 + _MARGIN * (self.tpot_ratio - 1.0)

    def _prompt_ratio(self, share: float) -> float:
        """How many times as long a prompt takes on a share as on the whole device."""
        here, whole = (self._layers.get(one, Mean()).value for one in (share, None))
        return 1.0 / share if here is None or whole is None else here / whole

    def _layer_seconds(self, num_tokens: int, share: float | None) -> float | None:
        cost = self._layers.get(share, Mean()).value
        if cost is None and share is not None:
            whole = self._layers.get(None, Mean()).value
            cost = None if whole is None else whole / share
        return None if cost is None else cost * num_tokens

    def _alone(self, batch_size: int) -> float | None:
        """Seconds of a round without prompts, of the nearest batch size that was seen."""
        if not self._rounds:
            return None
        wanted = _bucket(batch_size)
        return self._rounds[min(self._rounds, key=lambda one: abs(one - wanted))].value

    @property
    def _unseen(self) -> int:
        return self.num_layers // _UNSEEN_CALLS

    def _call(
        self, queue: PromptQueue, layers: int, share: float | None, reason: str
    ) -> SplitDecision:
        if self.layers is not None:
            layers, reason = self.layers, f"layers as given; {reason}"
        return SplitDecision(max(1, min(layers, queue.layers_left)), share, reason)


def _times(queue: PromptQueue) -> float:
    """What all prompts take, in times of the one that is next."""
    return 1.0 + queue.num_waiting_tokens / queue.num_tokens


def _bucket(batch_size: int) -> int:
    return (batch_size - 1).bit_length()
