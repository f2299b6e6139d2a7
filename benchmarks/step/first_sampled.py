"""How long the first answers that are sampled take at each batch size, beside later ones: with
graphs captured while idle, and without.

    python benchmarks/step/first_sampled.py smollm2-shape --load-format dummy \\
        --random-draft 16384 --speculative-num-steps 3 --speculative-simulate-accept-length 2.5 \\
        --new-tokens 64 --batch-sizes 1 2 4 8 16 32 64

Takes what `specengine bench throughput` takes. Both engines have answered greedily before, so that
all but graphs is warm.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.cli.bench import throughput
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.garbage import settled
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.throughput.plan import Plan, prepare


def milliseconds(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[float]:
    """Of each step of one batch."""
    last, times = perf_counter(), list[float]()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, stream=False)
    while engine.has_work:
        engine.step()
        now = perf_counter()
        times.append(1000 * (now - last))
        last = now
    return times


def measure(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    new_tokens = plan.workload.new_tokens
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=new_tokens, temperature=0.8, seed=1, ignore_eos=True)
    with ExitStack() as stack:
        config = prepare(plan, stack)
        loaded = load(config, Phases())
        for name in ("when needed", "while idle"):
            engine = build_engine(config, loaded, Phases())
            stack.enter_context(settled())
            start, count = perf_counter(), 0
            while name == "while idle" and engine.use_idle_moment():
                count += 1
            idle = perf_counter() - start
            for batch_size in plan.workload.batch_sizes:
                batches = [*plan.workload.batches(batch_size, loaded.model.vocab_size)]
                milliseconds(engine, batches[0], greedy)
                times = [milliseconds(engine, prompts, sampled) for prompts in batches[1:]]
                row: dict[str, Any] = {
                    "captured": name,
                    "batch": batch_size,
                    "first": sum(times[0]),
                }
                row |= {"later": min(map(sum, times[1:])), "longest step": max(times[0][1:])}
                rows.append(row | {"idle graphs": count, "idle seconds": idle})
                print(rows[-1], flush=True)
            del engine
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    throughput.add_arguments(parser)
    parser.set_defaults(repeats=3, compare_plain=False)
    plan = throughput.plan_of(parser.parse_args())
    notes = "Milliseconds of whole answers; the longest step is that of the first, prefill aside."
    title = "First sampled answers at each batch size"
    print(report.write("first-sampled", title, measure(plan), notes))


if __name__ == "__main__":
    main()
