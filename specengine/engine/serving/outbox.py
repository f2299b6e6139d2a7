"""What the choices of one front end gained and was not sent yet."""

from __future__ import annotations

from collections.abc import Callable

from specengine.engine.outgoing import Choice
from specengine.engine.serving.messages import Beginning, Detail, Ending, Gained, Reply, SpecCounts

Send = Callable[[Reply], bool]  # False: not now; what was given is not taken


# Events that a front end can be given in a second: each costs it some 40 us, whatever it holds.
EVENTS_A_SECOND = 10_000


class Outbox:
    """Sends a message a step at most, and one in `interval` seconds at most, or in more where it
    has many streams; first and last tokens do not wait. With an interval of 0 it sends each step.

    While the receiver takes nothing, later tokens join those that wait: a token waits once, so no
    more than the outputs of its open requests ever do.
    """

    def __init__(self, send: Send, interval: float = 0.0) -> None:
        self.send = send
        self._interval = interval
        self._tokens: dict[int, list[int]] = {}
        self._details: list[Detail] = []
        self._replies: list[Reply] = []  # go before the rest
        self._urgent: set[int] = set()  # streams whose tokens do not wait
        self._sent = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._tokens and not self._details and not self._replies

    def reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    def add(self, stream: int, choice: Choice) -> None:
        """What the choice gained since the last time."""
        start = choice.num_sent
        new = choice.take_tokens()
        waiting = self._tokens.get(stream)
        if waiting is None:
            self._tokens[stream] = new
        else:
            waiting += new
        req = choice.req
        if not start or req.finish_reason is not None:
            self._urgent.add(stream)
            self._details.append(_detail(stream, choice, start))
        elif req.sampling.logprobs is not None:
            self._details.append(Detail(stream, req.logprobs[start:], None, None))

    def drop(self, streams: range) -> None:
        """The caller of these has gone."""
        for stream in streams:
            self._tokens.pop(stream, None)
            self._urgent.discard(stream)
        self._details = [one for one in self._details if one.stream not in streams]

    def flush(self, now: float, must: bool = False) -> bool:
        """Send what waits, as far as it is time or `must` is set. False where the receiver takes
        nothing now. now: seconds of time.monotonic()."""
        while self._replies:
            if not self.send(self._replies[0]):
                return False
            del self._replies[0]
        if must or now - self._sent >= self._pause():
            return self._flush_all(now)
        return not self._urgent or self._flush_urgent()

    def _pause(self) -> float:
        """Seconds from one message to the next."""
        return self._interval and max(self._interval, len(self._tokens) / EVENTS_A_SECOND)

    def _flush_all(self, now: float) -> bool:
        if self._tokens or self._details:
            if not self.send(Gained(self._tokens, self._details)):
                return False
            self._tokens, self._details = {}, []
            self._urgent.clear()
            self._sent = now
        return True

    def _flush_urgent(self) -> bool:
        tokens, urgent = self._tokens, self._urgent
        details = [one for one in self._details if one.stream in urgent]
        if not self.send(Gained({stream: tokens[stream] for stream in urgent}, details)):
            return False
        self._details = [one for one in self._details if one.stream not in urgent]
        for stream in urgent:
            del tokens[stream]
        urgent.clear()
        return True


def _detail(stream: int, choice: Choice, start: int) -> Detail:
    req, beginning, ending = choice.req, None, None
    if not start:
        beginning = Beginning(req.prefix_hit_len, choice.times, req.prompt_logprobs)
    if req.finish_reason is not None:
        ending = Ending(req.finish_reason, choice.times, SpecCounts.of(req.spec), choice.embedding)
    return Detail(stream, req.logprobs[start:], beginning, ending)
