"""Microseconds a round that the CPU takes to choose how deep to draft, and to learn from it.

    OMP_NUM_THREADS=1 python benchmarks/step/choosing.py

Costs are a table, as measured for captured rounds; drafts are accepted with a chance of 0.95 at
each position. Every 90th round a request is at its end, and has no draft. No GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.estimate import HostSeconds, smaller_sizes
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.garbage import frozen_objects

STEPS = (0, 1, 2, 3)
NODES = {1: 5, 2: 16, 3: 16}  # of whole trees
STANDS = 0.95
ENDS = 90  # rounds, in one of which a request has no draft


def chooser(is_tree: bool) -> DepthChooser:
    sizes = smaller_sizes(STEPS, NODES.__getitem__) if is_tree else {}
    batches = [1, 2, 4, *range(8, 65, 8), 96, 128, 192, 256]
    costs = {n: {k: (57 + 30 * k) * (1 + n / 64) / 1e6 for k in STEPS} for n in batches}
    smaller = {
        size: {n: {k: 0.9 * costs[n][k] for k in STEPS if size in sizes.get(k, ())} for n in costs}
        for size in {one for found in sizes.values() for one in found}
    }
    return DepthChooser(
        STEPS, StepCosts(costs, smaller), sizes=sizes, host=HostSeconds(), pads=True
    )


def microseconds(is_tree: bool, requests: int, rounds: int) -> float:
    """Of a round with drafts, the mean."""
    steps, draw, times = chooser(is_tree), random.Random(0), []
    for number in range(rounds):
        start = perf_counter()
        choice = steps.choose(requests)
        chosen = perf_counter() - start
        depth = choice.num_steps
        nodes = (choice.num_nodes or NODES[depth]) - 1 if is_tree and depth else depth
        drafted = [nodes] * requests
        if number % ENDS == ENDS - 1:
            drafted[0] = 0
        accepted = [_run(draw, depth) if levels else 0 for levels in drafted]
        ranks = [sorted(draw.sample(range(1, nodes + 1), count)) for count in accepted]
        start = perf_counter()
        observation = RoundObservation(
            requests,
            depth,
            drafted,
            accepted,
            choice.num_nodes,
            ranks if is_tree else None,
            [depth] * requests if is_tree else drafted,
            seconds=1e-4,
        )
        steps.observe(observation)
        if depth:
            times.append(chosen + perf_counter() - start)
    return 1e6 * fmean(times)


def _run(draw: random.Random, depth: int) -> int:
    """How many in a row are accepted."""
    return next((place for place in range(depth) if draw.random() > STANDS), depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for is_tree in (False, True):
        for requests in args.requests:
            with frozen_objects():
                runs = [microseconds(is_tree, requests, args.rounds) for _ in range(args.repeats)]
            drafts = "trees of up to 16 nodes" if is_tree else "chains of up to 3"
            rows.append({"drafts": drafts, "requests": requests, "us a round": min(runs)})
            print(rows[-1], flush=True)
    notes = f"The best of {args.repeats} runs, of each the mean round with drafts."
    print(report.write("host-time", "choosing", "Choosing how deep to draft", rows, notes))


if __name__ == "__main__":
    main()
