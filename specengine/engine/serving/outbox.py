"""What the choices of one front end gained and was not sent yet."""

from __future__ import annotations

from collections.abc import Callable

from specengine.engine.outgoing import Choice
from specengine.engine.serving.messages import Beginning, Detail, Ending, Gained, Reply

Send = Callable[[Reply], bool]  # False: not now; what was given is not taken


# Events that a front end can be given in a second: each costs it some 40 us, whatever it holds.
EVENTS_A_SECOND = 10_000


class Outbox:
    """Sends a message a step at most, and one in `interval` seconds at most, or in more where it
    has many streams; first and last tokens do not wait. With an interval of 0 it sends each step.

    A step only notes which choices gained something: their tokens are taken when they are sent.
    While the receiver takes nothing, later tokens join those that wait: a token waits once, so no
    more than the outputs of its open requests ever do.
    """

    def __init__(self, send: Send, interval: float = 0.0) -> None:
        self.send = send
        self._interval = interval
        self._waiting: dict[int, Choice] = {}  # by stream
        self._replies: list[Reply] = []  # go before the rest
        self._urgent: dict[int, Choice] = {}  # of those that wait, what does not wait longer
        self._sent = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._replies

    def reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    def add(self, stream: int, choice: Choice) -> None:
        """The choice gained something since the last time."""
        self._waiting[stream] = choice
        if not choice.num_sent or choice.req.finish_reason is not None:
            self._urgent[stream] = choice

    def drop(self, streams: range) -> None:
        """The caller of these has gone."""
        for stream in streams:
            self._waiting.pop(stream, None)
            self._urgent.pop(stream, None)

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
        return self._interval and max(self._interval, len(self._waiting) / EVENTS_A_SECOND)

    def _flush_all(self, now: float) -> bool:
        if self._waiting:
            if not self._send(self._waiting):
                return False
            self._waiting.clear()
            self._urgent.clear()
            self._sent = now
        return True

    def _flush_urgent(self) -> bool:
        if not self._send(self._urgent):
            return False
        for stream in self._urgent:
            del self._waiting[stream]
        self._urgent.clear()
        return True

    def _send(self, choices: dict[int, Choice]) -> bool:
        """What they gained since they were sent last."""
        gained = Gained({}, [])
        for stream, choice in choices.items():
            req, start = choice.req, choice.num_sent
            gained.tokens[stream] = req.output_ids[start:]
            if stream in self._urgent or req.sampling.logprobs is not None:
                gained.details.append(_detail(stream, choice))
        if not self.send(gained):
            return False
        for stream, choice in choices.items():
            if not choice.num_sent:  # they went along; requests that have ended may be held on to
                choice.req.prompt_logprobs = []
            choice.num_sent += len(gained.tokens[stream])
        return True


def _detail(stream: int, choice: Choice) -> Detail:
    req, start, beginning, ending = choice.req, choice.num_sent, None, None
    if not start:
        beginning = Beginning(req.prefix_hit_len, choice.times, req.prompt_logprobs)
    if req.finish_reason is not None:
        ending = Ending(req.finish_reason, choice.times, req.spec, choice.embedding)
    return Detail(stream, req.logprobs[start:], beginning, ending)
