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

from specengine.engine.loop import Engine
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey
from specengine.engine.round.round import BoundRound
from specengine.engine.round.sampling import PLAIN, SamplingFeatures
from specengine.lab.step.attribution import DeviceRound, attribute, calls_of
from specengine.lab.step.parts import captured_parts, eager_parts, host_parts
from specengine.lab.step.stopwatch import Stopwatch, watching
from specengine.lab.step.timeline import Node, Trace, nodes_of, read_trace, rounds_of
from specengine.lab.throughput.workload import Workload

Prompts = list[list[int]]


@dataclass(frozen=True)
class OnDevice:
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


def measure_on_device(batch: Batch, rounds: RoundExecutor, batch_size: int) -> OnDevice:
    """Three runs: one warms up, one is timed on the host, one is profiled."""
    batch.run()
    watch, begun = Stopwatch(), 0.0

    def begin() -> None:
        nonlocal begun
        watch.clear()
        begun = perf_counter()

    with watching(host_parts(batch.engine, rounds), watch.part):
        batch.run(after_prefill=begin)
    seconds, count = perf_counter() - begun, max(watch.counts["collect"], 1)
    host = {part: spent / count for part, spent in watch.seconds.items()}
    sampling = rounds.sampling
    features = sampling.sampled if batch.workload.temperature else sampling.greedy
    kinds = [captured_nodes(batch.engine, rounds, batch_size, n, features) for n in rounds.steps]
    trace = _replays(batch)
    found = rounds_of(trace, kinds)
    return OnDevice(attribute(found), host, calls_of(trace, found), seconds / count)


def captured_nodes(
    engine: Engine,
    rounds: RoundExecutor,
    batch_size: int,
    num_steps: int,
    features: SamplingFeatures = PLAIN,
) -> list[Node]:
    """The nodes of a captured round with their parts, from one that runs eagerly on no request."""
    engine.step()  # collects what may still be in flight
    sizes = rounds.batch_sizes
    rows = rounds.rows.new_zeros(sizes[bisect.bisect_left(sizes, batch_size)])
    bound = BoundRound(rounds.round, rows, RoundKey(len(rows), num_steps, features))
    bound.run()  # rounds take turns with the halves of a buffer: two leave it as it was
    with _profiler(on_host=True) as trace, watching(captured_parts(engine, rounds), _mark):
        bound.run()
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
