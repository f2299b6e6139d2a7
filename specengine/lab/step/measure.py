"""The rounds of one batch, on the device's clock or on the host's."""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from specengine.engine.graph_round import GraphRound
from specengine.engine.loop import Engine
from specengine.engine.row_choices import BEST, Choosing
from specengine.lab.step.attribution import DeviceRound, attribute, calls_of
from specengine.lab.step.parts import captured_parts, eager_parts, host_parts
from specengine.lab.step.stopwatch import Stopwatch, watching
from specengine.lab.step.timeline import Node, Trace, nodes_of, read_trace, rounds_of
from specengine.lab.throughput.workload import Workload

Prompts = list[list[int]]


@dataclass(frozen=True)
class Flown:
    """Rounds that the device ran alone. Seconds a round."""

    device: DeviceRound
    host: dict[str, float]
    calls: dict[str, float]
    seconds: float  # of a round, without a profiler


@dataclass(frozen=True)
class Counted:
    """Rounds that the host ran piece by piece. Seconds a round, by part."""

    parts: dict[str, float]
    rounds: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Batch:
    """Requests that start and end together, again and again."""

    def __init__(self, engine: Engine, workload: Workload, batch_size: int) -> None:
        self.engine = engine
        self.workload = workload
        vocab_size = engine.parts.vocab_size
        self._runs = iter(workload.batches(batch_size, vocab_size))

    def run(self, after_prefill: Callable[[], None] = lambda: None) -> None:
        """after_prefill: called when every request has its first token."""
        engine, params = self.engine, self.workload.params
        waiting = set()
        for number, prompt in enumerate(next(self._runs)):
            engine.add_request(f"step-{number}", prompt, params)
            waiting.add(f"step-{number}")
        while engine.has_work:
            for output in engine.step():
                if output.rid in waiting:
                    waiting.remove(output.rid)
                    if not waiting:
                        after_prefill()


def measure_eager(batch: Batch) -> Counted:
    """Two runs: the first warms up."""
    engine = batch.engine
    on_gpu = engine.parts.worker.runner.device.type == "cuda"
    watch = Stopwatch(torch.cuda.synchronize if on_gpu else None)
    batch.run()
    with watching(eager_parts(engine), watch.part):
        batch.run(after_prefill=watch.clear)
    rounds = watch.counts["verify"]
    return Counted({part: seconds / rounds for part, seconds in watch.seconds.items()}, rounds)


def measure_flown(batch: Batch, flying: GraphRound, batch_size: int) -> Flown:
    """Three runs: one warms up, one is timed on the host, one is profiled."""
    batch.run()
    watch, begun = Stopwatch(), 0.0

    def begin() -> None:
        nonlocal begun
        watch.clear()
        begun = perf_counter()

    with watching(host_parts(batch.engine, flying), watch.part):
        batch.run(after_prefill=begin)
    seconds, rounds = perf_counter() - begun, max(watch.counts["land"], 1)
    host = {part: spent / rounds for part, spent in watch.seconds.items()}
    choosing = flying.choices.sampled if batch.workload.temperature else flying.choices.greedy
    kinds = [captured_nodes(batch.engine, flying, batch_size, n, choosing) for n in flying.steps]
    trace = _replays(batch)
    found = rounds_of(trace, kinds)
    return Flown(attribute(found), host, calls_of(trace, found), seconds / rounds)


def captured_nodes(
    engine: Engine,
    flying: GraphRound,
    batch_size: int,
    num_steps: int,
    choosing: Choosing = BEST,
) -> list[Node]:
    """The nodes of a captured round with their parts, from one that runs eagerly on no request."""
    engine.step()  # lands what may still be in the air
    sizes = flying.batch_sizes
    rows = flying.rows.new_zeros(sizes[bisect.bisect_left(sizes, batch_size)])
    flying.run(
        rows, num_steps, choosing
    )  # rounds take turns with the halves of a buffer: two leave it
    with _profiler(on_host=True) as trace, watching(captured_parts(engine, flying), _mark):
        flying.run(rows, num_steps, choosing)
        torch.cuda.synchronize()
    return nodes_of(trace())


@contextmanager
def _mark(part: str) -> Iterator[None]:
    torch.cuda.synchronize()
    with torch.profiler.record_function(part):
        yield
        torch.cuda.synchronize()


def _replays(batch: Batch) -> Trace:
    with _profiler(on_host=False) as trace:
        batch.run()
        torch.cuda.synchronize()
    return trace()


def _activities(on_host: bool) -> list[torch.profiler.ProfilerActivity]:
    """Marks are the host's."""
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CUDA, kinds.CPU] if on_host else [kinds.CUDA]


@contextmanager
def _profiler(on_host: bool) -> Iterator[Callable[[], Trace]]:
    """Yields what reads the trace, once the block has been left."""
    profile = torch.profiler.profile(activities=_activities(on_host))

    def read() -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            return read_trace(file)

    torch.cuda.synchronize()
    with profile:
        yield read
