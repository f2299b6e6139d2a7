"""Where a batch with a drafter takes longer than one without: both engines by turns, step by step.

    python benchmarks/step/by_turns.py smollm2-shape --load-format dummy --random-draft 16384 \\
        --speculative-num-steps 3 --speculative-simulate-accept-length 1.1 --batch-sizes 8 16 128

Takes what `specengine bench throughput --compare-plain` takes, and runs the same batches. The first
step is the prefill, the second launches the first round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.cli.bench import throughput
from specengine.core.config import SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.garbage import frozen_objects
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.throughput.plan import Plan, prepare


def milliseconds(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[float]:
    """Of each step of one batch; of the first one with its requests' queueing."""
    last, times = perf_counter(), list[float]()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, stream=False)
    while engine.has_work:
        engine.step()
        now = perf_counter()
        times.append(1000 * (now - last))
        last = now
    return times


def summary(times: list[float]) -> dict[str, float]:
    usual = statistics.median(times[2:-1])
    return {
        "prefill": times[0],
        "launch": times[1],
        "usual": usual,
        "rest above usual": sum(times[2:-1]) - usual * len(times[2:-1]),
        "last": times[-1],
        "all": sum(times),
    }


def measure(plan: Plan) -> list[dict[str, Any]]:
    """A row an engine and batch size: of each figure the median, of `all` the best, too."""
    rows, count = [], plan.workload.new_tokens
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        config = prepare(plan, stack)
        loaded, spec = load(config, Phases()), str(config.spec.algorithm)
        engines = {spec: build_engine(config, loaded, Phases())}
        engines["plain"] = build_engine(replace(config, spec=SpecConfig()), loaded, Phases())
        stack.enter_context(frozen_objects())
        for batch_size in plan.workload.batch_sizes:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            batches = plan.workload.batches(batch_size, loaded.model.vocab_size)
            for number, prompts in enumerate(batches):
                for name in engines if number % 2 else reversed(engines):
                    times = milliseconds(engines[name], prompts, params)
                    if number:
                        runs[name].append(summary(times))
            for name, found in runs.items():
                row: dict[str, Any] = {"batch": batch_size, "engine": name}
                row |= {key: statistics.median(one[key] for one in found) for key in found[0]}
                rows.append(row | {"best": min(one["all"] for one in found)})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    throughput.add_arguments(parser)
    parser.set_defaults(compare_plain=True, repeats=8)
    plan = throughput.plan_of(parser.parse_args())
    notes = "Milliseconds; medians, and the best of all."
    title = "Steps of a batch with a drafter and without, by turns"
    print(report.write("host-time", "by-turns", title, measure(plan), notes))


if __name__ == "__main__":
    main()
