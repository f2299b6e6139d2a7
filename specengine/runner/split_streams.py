"""Where the layers of split prompts run: in turns with rounds, or on streams beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specengine.runner.green_contexts import SmParts

T = TypeVar("T")


class Call(Protocol):
    """Some layers of a prompt, launched."""

    @property
    def is_done(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """That it ran for, once it is done."""
        ...

    def wait(self) -> None:
        """Until it is done."""
        ...


@dataclass(frozen=True)
class DoneCall:
    seconds: float
    is_done: bool = True

    def wait(self) -> None: ...


class SplitStreams:
    """As it is on a CPU, and where several ranks compute both: layers and rounds take turns.

    most_calls: that may be launched and not done. takes_turns: what is launched is done before
    `launch` returns.
    """

    most_calls = 1
    takes_turns = True

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

    def begin(self) -> None:
        """What is launched next runs behind all that the current stream was given so far."""

    def join(self) -> None:
        """What the current stream is given next runs behind all that was launched so far."""

    def forget_shares(self) -> None:
        """From now on there is None alone."""

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """The current stream may read tensors that were made in a `launch` whose call is done."""


@dataclass(frozen=True)
class StreamCall:
    started: torch.cuda.Event
    ended: torch.cuda.Event

    @property
    def is_done(self) -> bool:
        return bool(self.ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return float(self.started.elapsed_time(self.ended)) / 1000.0

    def wait(self) -> None:
        self.ended.synchronize()


@dataclass
class BesideRounds(SplitStreams):
    """Streams of a GPU beside the current one, which rounds run on.

    What the streams share with rounds, and why none of it is written by two at once:

    - Weights, rotary tables and the KV of cached prefixes are read alone. Weights are replaced
      behind `join` only (Engine.update_weights).
    - KV slots, page-table rows and recurrent state belong to one request. A prompt's were last
      written by what ran before `begin`. What a prompt gives up is given to others behind `join`
      only (SplitPrompts.settle), and its later layers do not write there.
    - Memory of PyTorch's allocator belongs to the stream that it was allocated on, and is used
      there alone: a call allocates on its own stream all that it writes. Calls run one behind
      another, whatever their stream, so that what one of the streams freed is not in use by
      another. What the current stream reads in the end goes through `hand_over`.
    - Workspaces: cuBLAS keeps one for each stream, as products whose sums are split keep their
      counters (split_sum_triton). An attention backend keeps its own: prompts have an instance of
      theirs. The head, whose kernels for few rows keep counters, runs on the
      current stream.
    - CUDA graphs and their pool belong to the current stream, and to those of rounds that run in
      turn with it (RoundLanes): what is launched here runs eagerly.
    """

    parts: dict[float, SmParts]  # by share
    whole: torch.cuda.Stream  # of all SMs
    most_calls: int = 2
    takes_turns: bool = False
    _last: torch.cuda.Event | None = None
    _starts: list[torch.cuda.Event] = field(default_factory=list)  # to be waited for

    @property
    def shares(self) -> Sequence[float]:
        return sorted(self.parts)

    def launch(self, share: float | None, run: Callable[[], T]) -> tuple[T, Call]:
        stream = self.whole if share is None else self.parts[share].share.stream
        for event in (*self._starts, *([] if self._last is None else [self._last])):
            stream.wait_event(event)
        self._starts.clear()
        call = StreamCall(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            call.started.record(stream)
            try:
                found = run()
            finally:  # what was launched before an error runs all the same
                call.ended.record(stream)
                self._last = call.ended
        return found, call

    @property
    def round_streams(self) -> dict[float | None, torch.cuda.Stream]:
        """On which rounds are captured, by the share that prompts have beside them. On all SMs they
        go before prompts."""
        first = torch.cuda.Stream(self.whole.device, priority=-1)  # type: ignore[no-untyped-call]
        return {None: first, **{share: one.rest.stream for share, one in self.parts.items()}}

    def begin(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._starts.append(event)

    def join(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def forget_shares(self) -> None:
        self.parts, self.most_calls = {}, 1

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())
