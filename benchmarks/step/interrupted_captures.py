"""How long work that comes amid a background capture waits for it.

    python benchmarks/step/interrupted_captures.py smollm2-shape --load-format dummy \\
        --random-draft 16384 --speculative-num-steps 3 --speculative-simulate-accept-length 2.5

Takes what `specengine bench throughput` takes. Work comes 2 to 30 ms after every third idle moment
began, until all graphs of idle moments are captured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Timer
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.cli.bench import throughput
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.throughput.plan import prepare


def waits(engine: Engine, rng: random.Random) -> tuple[list[float], int]:
    """Seconds that work waited, and how many idle moments there were."""
    came, found, moments = Event(), [], 0
    at = [0.0]

    def come() -> None:
        at[0] = perf_counter()
        came.set()

    more = True
    while more:
        timer = Timer(rng.uniform(0.002, 0.03), come) if moments % 3 == 2 else None
        if timer is not None:
            timer.start()
        more = engine.use_idle_moment(is_wanted=came.is_set)
        moments += 1
        if timer is not None:
            timer.cancel()
        if came.is_set():
            found.append(perf_counter() - at[0])
            came.clear()
    return found, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    throughput.add_arguments(parser)
    plan = throughput.plan_of(parser.parse_args())
    with ExitStack() as stack:
        config = prepare(plan, stack)
        engine = build_engine(config, load(config, Phases()), Phases())
        found, moments = waits(engine, random.Random(0))
    if not found:
        raise SystemExit("nothing was captured in idle moments: is the memory for graphs spent?")
    milliseconds = sorted(1000 * one for one in found)
    rank = round(0.99 * (len(milliseconds) - 1))
    row: dict[str, Any] = {
        "model": config.model.model,
        "captures": moments,
        "interrupted": len(milliseconds),
        "median wait, ms": statistics.median(milliseconds),
        "99%": milliseconds[rank],
        "longest": milliseconds[-1],
    }
    print(row, flush=True)
    notes = (
        "How long work waits that comes amid a background capture; such captures are made again."
    )
    title = "Work that comes amid a background capture"
    print(report.write("start-up", "interrupted-captures", title, [row], notes))


if __name__ == "__main__":
    main()
