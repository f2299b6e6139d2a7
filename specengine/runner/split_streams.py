"""Where the layers of split prompts run: in turns with rounds, or on streams beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, TypeVar

from torch import Tensor

from specengine.core.platform import Event, Platform, Stream
from specengine.runner.green_contexts import SmParts

T = TypeVar("T")


class Call(Protocol):
    """Some layers of a prompt, launched."""

    @property
    def is_done(self) -> bool: ...

    @property
    def is_readable(self) -> bool:
        """Whether the current stream may read what it gave: the call is done, or the stream waits
        for it."""
        ...

    @property
    def seconds(self) -> float:
        """How long it ran; defined once it is done."""
        ...

    def wait(self) -> None:
        """Until it is done."""
        ...


@dataclass(frozen=True)
class DoneCall:
    seconds: float
    is_done: bool = True
    is_readable: bool = True

    def wait(self) -> None: ...


class SplitStreams:
    """As it is on a CPU, and where several ranks compute both: what is launched is done before the
    method returns.

    most_calls: beside rounds, that may be launched and not done.
    """

    most_calls = 1

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        """synchronize: the host waits for what it has launched, where that runs later."""
        self._synchronize = synchronize

    @property
    def shares(self) -> Sequence[float]:
        """Of the device's SMs, ascending, that `launch` takes beside None."""
        return ()

    def launch(self, share: float | None, run: Callable[[], T]) -> tuple[T, Call]:
        """What `run` launches runs behind all that was launched so before, beside what the current
        stream does."""
        self._synchronize()  # a round before is not a part of the call
        started = perf_counter()
        found = run()
        self._synchronize()
        return found, DoneCall(perf_counter() - started)

    def take_turn(self, run: Callable[[], T]) -> tuple[T, Call]:
        """The same on all SMs, but behind all that the current stream was given so far; and what
        that is given next runs behind it. The host does not wait."""
        return self.launch(None, run)

    def stay(self, run: Callable[[], T]) -> tuple[T, Call]:
        """`run` on the current stream, measured."""
        return self.launch(None, run)

    def begin(self) -> None:
        """What is launched next runs behind all that the current stream was given so far."""

    def join(self) -> None:
        """What the current stream is given next runs behind all that was launched so far."""

    def forget_shares(self) -> None:
        """From now on there is None alone."""

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """The current stream may read tensors that were made in a call that is readable."""


@dataclass(frozen=True)
class StreamCall:
    started: Event
    ended: Event
    in_turn: bool = False

    @property
    def is_done(self) -> bool:
        return self.ended.query()

    @property
    def is_readable(self) -> bool:
        return self.in_turn or self.is_done

    @property
    def seconds(self) -> float:
        return float(self.started.elapsed_time(self.ended)) / 1000.0

    def wait(self) -> None:
        self.ended.synchronize()


@dataclass
class BesideRounds(SplitStreams):
    """Streams of an accelerator beside the current one, which rounds run on.

    What the streams share with rounds, and why none of it is written by two at once:

    - Weights, rotary tables and the KV of cached prefixes are read alone. Weights are replaced
      behind `join` only (Engine.update_weights).
    - KV slots, page-table rows and recurrent state belong to one request. A prompt's were last
      written by what ran before `begin`. What a prompt gives up is given to others behind `join`
      only (SplitPrompts.settle), and its later layers do not write there.
    - Memory of PyTorch's allocator belongs to the stream that it was allocated on, and is used
      there alone: a call allocates on its own stream all that it writes. Calls run one behind
      another, whatever their stream, so that what one of the streams freed is not in use by
      another. What the current stream reads in the end goes through `hand_over`. So calls in turns
      have a stream of their own, too: a call on a share may read what one in turns has left.
    - Workspaces: cuBLAS keeps one for each stream, as products whose sums are split keep their
      counters (split_sum_triton). An attention backend keeps its own: prompts have an instance of
      theirs. The head, whose kernels for few rows keep counters, runs on the
      current stream.
    - CUDA graphs and their pool belong to the current stream, and to those of rounds that run in
      turn with it (RoundLanes): what is launched here runs eagerly.
    """

    parts: dict[float, SmParts]  # by share
    whole: Stream  # of all SMs
    platform: Platform
    most_calls: int = 2
    _last: Event | None = None
    _starts: list[Event] = field(default_factory=list)  # to be waited for

    @property
    def shares(self) -> Sequence[float]:
        return sorted(self.parts)

    def launch(self, share: float | None, run: Callable[[], T]) -> tuple[T, Call]:
        return self._launch(share, run)

    def take_turn(self, run: Callable[[], T]) -> tuple[T, Call]:
        self.begin()
        try:
            found, call = self._launch(None, run)
        finally:
            self.join()
        return found, replace(call, in_turn=True)

    def stay(self, run: Callable[[], T]) -> tuple[T, Call]:
        call = self._new_call(in_turn=True)
        call.started.record()
        found = run()
        call.ended.record()
        return found, call

    def _launch(self, share: float | None, run: Callable[[], T]) -> tuple[T, StreamCall]:
        stream: Any = self.whole if share is None else self.parts[share].share.stream
        for event in (*self._starts, *([] if self._last is None else [self._last])):
            stream.wait_event(event)
        self._starts.clear()
        call = self._new_call()
        with self.platform.on_stream(stream):
            call.started.record(stream)
            try:
                found = run()
            finally:  # what was launched before an error runs all the same
                call.ended.record(stream)
                self._last = call.ended
        return found, call

    def _new_call(self, in_turn: bool = False) -> StreamCall:
        started, ended = (self.platform.new_event(timing=True) for _ in range(2))
        return StreamCall(started, ended, in_turn)

    @property
    def round_streams(self) -> dict[float, Any]:
        """On which rounds are captured, by the share that prompts have beside them."""
        return {share: one.rest.stream for share, one in self.parts.items()}

    def begin(self) -> None:
        event = self.platform.new_event()
        event.record(self.platform.current_stream())
        self._starts.append(event)

    def join(self) -> None:
        if self._last is not None:
            self.platform.current_stream().wait_event(self._last)

    def forget_shares(self) -> None:
        self.parts = {}

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.platform.read_on(tensor, self.platform.current_stream())
