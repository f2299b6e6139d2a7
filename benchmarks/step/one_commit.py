"""The engine of one commit, which runs a batch when told to: the process that two_commits.py keeps
for each side. Lines of JSON in and out.

    PYTHONPATH=TREE python benchmarks/step/one_commit.py bench throughput tiny [FLAGS]

What it takes of specengine has had these names since before the engine was rebuilt, but for those
that `num_rounds` reads.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch

from specengine.cli.main import main
from specengine.lab.accept.speed import Timing, run_batches
from specengine.lab.throughput.run import ThroughputBench

_MOST = 500  # runs of one kind


class Waiting:
    """Seconds that the host has waited for the device, and how often: with NGRAM, once a
    round of the whole batch."""

    def __init__(self) -> None:
        self.clear()
        inner = torch.cuda.Event.synchronize

        def synchronize(event: torch.cuda.Event) -> None:
            start = perf_counter()
            inner(event)
            self.seconds += perf_counter() - start
            self.times += 1

        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]

    def clear(self) -> None:
        self.seconds, self.times = 0.0, 0


def answer_lines(bench: Any, report: Any, engines: dict[str, Any], vocab_size: int) -> None:
    """In place of the bench's own runs: {"engine", "batch", "temperature"} -> what a run took."""
    waiting, prompts = Waiting(), dict[tuple[Any, ...], Iterator[list[list[int]]]]()
    say({"engines": list(engines), "startup": [asdict(one.startup) for one in report.settings]})
    for line in sys.stdin:
        asked = json.loads(line)
        name, size, temperature = asked["engine"], asked["batch"], asked["temperature"]
        work = replace(bench.plan.workload, temperature=temperature, repeats=_MOST)
        if (name, size, temperature) not in prompts:
            prompts[name, size, temperature] = iter(work.batches(size, vocab_size))
        batch = next(prompts[name, size, temperature])
        waiting.clear()
        cpu = process_time()
        run = partial(run_batches, engines[name], batch, work.params, size, _ignore)
        timing, kernels = profiled(run) if asked.get("profile") else (run(), {})
        cpu = process_time() - cpu
        say(
            {
                "tokens": timing.tokens,
                "seconds": timing.seconds,
                "rounds": num_rounds(timing.spec) / size,
                "waits": waiting.times,
                "host": timing.seconds - waiting.seconds,
                "cpu": cpu,
                "kernels": kernels,
            }
        )


def num_rounds(spec: Any) -> int:
    """Of a commit's SpecStats, which once called them num_steps."""
    found: int = spec.num_rounds if hasattr(spec, "num_rounds") else spec.num_steps
    return found


def _ignore(num_tokens: int) -> None: ...


def profiled(run: Callable[[], Timing]) -> tuple[Timing, dict[str, list[float]]]:
    """And of each kernel, copy and fill its launches and seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timing = run()
        torch.cuda.synchronize()
    found = {one.key: [one.count, one.device_time_total / 1e6] for one in profile.key_averages()}
    return timing, found


def say(what: dict[str, Any]) -> None:
    _answers.write(json.dumps(what) + "\n")
    _answers.flush()


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    ThroughputBench._sweep = answer_lines  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
