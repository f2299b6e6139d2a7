"""An accelerator of tests: it computes on the CPU, and has graphs, streams, events and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specengine.core import platform
from specengine.core.platform import DeviceMemory, KernelSpan
from specengine.core.platforms.cpu import CpuPlatform
from specengine.core.registry import ATTENTION_BACKENDS, PLATFORMS
from specengine.runner.forward_graphs import prefill
from specengine.runner.forward_graphs.keys import SMALL_PREFILLS

T = TypeVar("T")
PLACE = "tests.support.fake_platform:FakePlatform"
GRAPH = 10  # bytes that a capture takes


class FakeStream:
    """Knows how much of each stream's work its own work comes after."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = Counter({number: 1})

    def wait_stream(self, stream: Any) -> None:
        self.seen |= stream.seen

    def wait_event(self, event: Any) -> None:
        assert event.seen is not None, "waited for before it was recorded"
        self.seen |= event.seen

    def launch(self) -> None:
        self.seen[self.number] += 1


class FakeEvent:
    """The host sees it pass only after it has waited for it, or for what comes after it."""

    def __init__(self, owner: FakePlatform, timing: bool) -> None:
        self.owner, self.timing = owner, timing
        self.seen: Counter[int] | None = None

    def record(self, stream: Any = None) -> None:
        stream = stream or self.owner.streams[-1]
        stream.launch()
        self.seen = Counter(stream.seen)

    def synchronize(self) -> None:
        self.owner.awaited |= self.seen or Counter()

    def query(self) -> bool:
        return self.seen is not None and self.seen <= self.owner.awaited

    def elapsed_time(self, end: Any) -> float:
        assert self.timing, "the event was made without timing"
        assert end.query(), "the host has not waited for the end"
        return 1.0 + sum(end.seen.values()) - sum((self.seen or Counter()).values())


@dataclass
class FakeGraph:
    """Runs again what was recorded, and writes to what it wrote at first. made: what the capture
    came after, which a replay must come after too."""

    owner: FakePlatform
    run: Callable[[], Any]
    output: Any
    made: Counter[int]

    def replay(self) -> None:
        stream = self.owner.streams[-1]
        assert self.made <= stream.seen, "the replay does not wait for what made its buffers"
        stream.launch()
        self.owner.num_replays += 1
        for kept, found in zip(_tensors(self.output), _tensors(self.run()), strict=True):
            kept.copy_(found)


class FakeMemory(DeviceMemory):
    """Every capture takes bytes; a forward at full size takes 1000."""

    def __init__(self, owner: FakePlatform) -> None:
        self.owner = owner

    def total(self) -> int:
        return 8 << 30

    def used(self) -> int:
        return (1 << 20) + GRAPH * self.owner.num_captures

    def current(self) -> int:
        return self.used()

    def peak(self) -> int:
        return self.used() + 1000

    def reset_peak(self) -> None: ...


class FakePlatform(CpuPlatform):
    is_accelerator = True
    has_graphs = True
    attention_backend = "device lengths"

    def __init__(self) -> None:
        self.streams = [FakeStream(0)]  # the current one last
        self.num_streams = 1
        self.captures_on = self.new_stream()
        self.awaited = Counter[int]()  # how much of each stream's work the host has waited for
        self.is_recording = False
        self.num_captures = self.num_replays = self.num_pools = 0

    def num_devices(self) -> int:
        return 1

    def device_name(self, device: torch.device) -> str:
        return "Fake"

    def memory(self, device: torch.device) -> DeviceMemory:
        return FakeMemory(self)

    def free_memory(self) -> int:
        memory = FakeMemory(self)
        return memory.total() - memory.used()

    def pinned(self, values: Tensor) -> Tensor:
        return values.clone()

    def new_event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self, timing)

    def new_stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self.num_streams)

    def current_stream(self) -> FakeStream:
        return self.streams[-1]

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        stream.launch()
        try:
            yield
        finally:
            self.streams.pop()

    def graph_pool(self) -> Any:
        self.num_pools += 1
        return self.num_pools

    def capture_stream(self) -> FakeStream:
        return self.captures_on

    def record(self, run: Callable[[], T], pool: Any, stream: Any) -> tuple[Any, T]:
        assert not self.is_recording, "a capture within a capture"
        assert pool, "graphs share a pool"
        self.is_recording = True
        try:
            output = run()
        finally:
            self.is_recording = False
        self.num_captures += 1
        return FakeGraph(self, run, output, Counter(stream.seen)), output

    def kernel_spans(self, run: Callable[[], object]) -> list[KernelSpan]:
        """A kernel a replay."""
        before = self.num_replays
        run()
        return [KernelSpan("replay", 2.0)] * (self.num_replays - before)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, list | tuple):
        return [tensor for one in output for tensor in _tensors(one)]
    found = vars(output).values() if is_dataclass(output) else ()
    return [one for one in found if isinstance(one, Tensor)]


def use_fake_platform(monkeypatch: pytest.MonkeyPatch) -> FakePlatform:
    """From now on devices of the kind "cpu" are the fake's: one line of the registry, and one for
    its attention."""
    monkeypatch.setitem(PLATFORMS, "cpu", PLACE)
    place = "tests.support.device_lengths:DeviceLengths"
    monkeypatch.setitem(ATTENTION_BACKENDS, "device lengths", place)
    monkeypatch.setattr(platform, "_made", {})
    monkeypatch.setattr(prefill, "PREFILL_KEYS", SMALL_PREFILLS[:2])  # the others take minutes
    found = platform.platform_of(torch.device("cpu"))
    assert isinstance(found, FakePlatform)
    return found
