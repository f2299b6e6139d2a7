"""How many layers of a split prompt run at a time, and on which share of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Weight of a new measurement in the running mean.
_NEW = 0.25
# How much longer a token may take is used up to this part: rounds differ.
_MARGIN = 0.9
# A prompt with no other behind it may take so many times what it takes alone.
PROMPT_RATIO = 1.4
# Seconds over which rounds are held to the ratio: what answers take; before any has ended, and at
# least and at most.
_UNSEEN_ANSWER, _LEAST, _MOST = 2.0, 0.05, 4.0
# Measurements of a share that do not count: the first ones allocate its memory, which waits for the
# device. On an H100 they said ten times what later ones do.
_FIRST = 2
# Rounds after which what was measured of a share is forgotten, so that it is tried again.
_KEPT = 1000
# No call delays a round by more than so many rounds, whatever the time before allows.
_MOST_DELAY = 3.0
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
    """layers: of the next call. share: of the device's SMs; None is all of them, at a lower
    priority than rounds, or in turns with them."""

    layers: int
    share: float | None
    reason: str


@dataclass
class _Mean:
    """Of measurements, the newer the heavier, without the first `skips`. None before. last: round
    of the last one."""

    value: float | None = None
    skips: int = 0
    last: int = 0

    def add(self, value: float, now: int = 0) -> None:
        self.last = now
        if self.skips:
            self.skips -= 1
            return
        self.value = value if self.value is None else self.value + _NEW * (value - self.value)

    def forget_before(self, last: int) -> None:
        """What is older than that. Nothing is skipped again."""
        if self.last < last:
            self.value = None


@dataclass
class _Lately:
    """Seconds that the last rounds took, and that they would have taken without prompts: the older
    the lighter. Their quotient is how many times as long tokens take."""

    taken: float = 0.0
    alone: float = 0.0
    seconds: float = _UNSEEN_ANSWER  # after which little of a round is left

    def add(self, taken: float, alone: float) -> None:
        kept = math.exp(-taken / self.seconds)
        self.taken, self.alone = self.taken * kept + taken, self.alone * kept + alone

    def after(self, seconds: float, slowdown: float) -> float:
        """The quotient, once rounds have been so much slower for so many seconds more."""
        kept = math.exp(-seconds / self.seconds)
        return (self.taken * kept + seconds) / (self.alone * kept + seconds / slowdown)


@dataclass
class SplitPrefillPolicy:
    """Decides from what was measured: seconds a round takes without and beside prompts, seconds a
    layer of a prompt takes a token, on each share.

    Tokens may take `tpot_ratio` times as long beside prompts, over the time that an answer takes: a
    prompt now and then is given much, prompts without end are given what rounds bear for good.

    num_layers: of the model. shares: that prompts can have, ascending; none where prompts and
    rounds take turns or share all SMs. tpot_ratio: how many times as long a token may take beside
    prompts. layers: fixed, or None.
    """

    num_layers: int
    shares: Sequence[float] = ()
    tpot_ratio: float = 1.5
    layers: int | None = None
    _rounds: dict[int, _Mean] = field(default_factory=dict)  # seconds, by batch sizes doubled
    _slowdowns: dict[float | None, _Mean] = field(default_factory=dict)  # of rounds, by share
    _layers: dict[float | None, _Mean] = field(default_factory=dict)  # seconds a layer and token
    _answers: _Mean = field(default_factory=_Mean)  # seconds
    _lately: _Lately = field(default_factory=_Lately)
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
        for mean in (*self._slowdowns.values(), *self._layers.values()):
            mean.forget_before(self._num_rounds - _KEPT)
        if beside is None:
            self._rounds.setdefault(_bucket(batch_size), _Mean()).add(seconds)
        alone = self._alone(batch_size)
        if alone is None:
            return
        if beside is not None:
            seen = self._slowdowns.setdefault(beside.share, _Mean(skips=_FIRST))
            seen.add(seconds / alone, self._num_rounds)
        self._lately.add(seconds + delay, seconds if beside is None else alone)

    def saw_answer(self, seconds: float) -> None:
        """From a request's first token to its last."""
        self._answers.add(seconds)
        assert self._answers.value is not None
        self._lately.seconds = min(max(self._answers.value, _LEAST), _MOST)

    def saw_layers(self, call: SplitDecision, num_tokens: int, seconds: float) -> None:
        """How long a call took."""
        cost = seconds / (call.layers * num_tokens)
        skips = 0 if call.share is None else _FIRST
        seen = self._layers.setdefault(call.share, _Mean(skips=skips))
        seen.add(cost, self._num_rounds)

    def decide(self, queue: PromptQueue, batch_size: int) -> SplitDecision:
        """batch_size: requests that run. With none, the prompt has the device to itself."""
        if not batch_size:
            return self._call(queue, queue.layers_left, None, "no round runs")
        if not self.shares:
            return self._take_turns(queue, batch_size)
        share, reason = self._share(queue)
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

    def _take_turns(self, queue: PromptQueue, batch_size: int) -> SplitDecision:
        """A call delays each round by what it takes."""
        took, alone = self._layer_seconds(queue.num_tokens, None), self._alone(batch_size)
        if took is None or alone is None:
            return self._call(queue, 1, None, "nothing measured yet")
        most = min(queue.layers_left, int(_MOST_DELAY * alone / took))
        for layers in range(most, 1, -1):
            slowdown = 1.0 + layers * took / alone
            seconds = queue.layers_left / layers * (alone + layers * took) * _times(queue)
            if self._lately.after(seconds, slowdown) <= self._limit:
                return self._call(queue, layers, None, "as long as rounds may be delayed")
        return self._call(queue, 1, None, "the least: rounds bear no more")

    def _share(self, queue: PromptQueue) -> tuple[float, str]:
        """The largest that rounds bear, or a smaller one that serves the prompt well enough."""
        borne = [one for one in self.shares if self._after(queue, one) <= self._limit]
        if not borne:
            return self.shares[0], "the smallest share: rounds bear none"
        if queue.num_waiting_tokens:
            return borne[-1], "the largest share that rounds bear: prompts wait"
        for one in borne:
            if self._prompt_ratio(one) <= PROMPT_RATIO:
                return one, "the smallest share that is fast enough for the prompt"
        return borne[-1], "the largest share that rounds bear"

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
        here, whole = (self._layers.get(one, _Mean()).value for one in (share, None))
        return 1.0 / share if here is None or whole is None else here / whole

    def _layer_seconds(self, num_tokens: int, share: float | None) -> float | None:
        cost = self._layers.get(share, _Mean()).value
        if cost is None and share is not None:
            whole = self._layers.get(None, _Mean()).value
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
