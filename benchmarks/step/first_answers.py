"""How long the first answers take at each batch size, greedy and sampled, beside later ones: with
graphs captured while idle, and without.

    python benchmarks/step/first_answers.py smollm2-shape --load-format dummy \\
        --random-draft 16384 --speculative-num-steps 3 --speculative-simulate-accept-length 2.5 \\
        --new-tokens 64 --batch-sizes 1 2 4 8 16 32 64

Takes what `specengine bench throughput` takes. The first engine of the process also compiles what
no cache has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from by_turns import milliseconds

from specengine.cli.bench import throughput
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.garbage import frozen_objects
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.throughput.plan import Plan, prepare


def rows_of(engine: Engine, plan: Plan, vocab_size: int) -> Iterator[dict[str, float]]:
    """One a batch size."""
    work = plan.workload
    greedy = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, ignore_eos=True)
    sampled = replace(greedy, temperature=0.8, seed=1)
    for batch_size in work.batch_sizes:
        batches = work.batches(batch_size, vocab_size)
        row: dict[str, float] = {"batch": batch_size}
        for name, params in (("greedy", greedy), ("sampled", sampled)):
            times = [milliseconds(engine, prompts, params) for prompts in batches]
            row[f"first {name}"] = sum(times[0])
            row[f"later {name}"] = min(map(sum, times[1:]))
            row[f"longest step of the first {name}"] = max(times[0])
        yield row


def measure(plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        config = prepare(plan, stack)
        loaded = load(config, Phases())
        vocab_size = loaded.model.vocab_size
        for name in ("when needed", "while idle"):
            engine = build_engine(config, loaded, Phases())
            stack.enter_context(frozen_objects())
            start, count = perf_counter(), 0
            while name == "while idle" and engine.use_idle_moment():
                count += 1
            facts = {"idle captures": count, "idle seconds": perf_counter() - start}
            for row in rows_of(engine, plan, vocab_size):
                rows.append({"captured": name, **row, **facts})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    throughput.add_arguments(parser)
    parser.set_defaults(repeats=3, compare_plain=True)  # room for two engines
    plan = throughput.plan_of(parser.parse_args())
    notes = "Milliseconds of whole answers; later ones are the best of the others."
    title = "First answers at each batch size"
    print(report.write("start-up", "first-answers", title, measure(plan), notes))


if __name__ == "__main__":
    main()
