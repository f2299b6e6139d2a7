"""The CPU's part of rounds whose drafts are looked up in the text, where the text repeats itself.

    OMP_NUM_THREADS=1 python benchmarks/step/lookup_drafts.py

The engine runs such rounds as on a GPU, but no model is run: each request emits one token over and
over, and the drafts that equal it are accepted. Each request has a prompt of 30 tokens and 256 new
ones. Idle: from the result of a round to the launch of the next, in which a device would have
nothing to do. No GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from host_steps import NEW, PROMPT, Passed, engine_of, milliseconds

from specengine import SpecConfig
from specengine.engine.garbage import frozen_objects
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey
from specengine.engine.round.lookup import LookupChains


class Clock(Passed):
    """When a round's result came."""

    done_at: float | None = None

    def synchronize(self) -> None:
        Clock.done_at = perf_counter()


class Repeating:
    """The graph of a round. Replaying it takes hardly any time. idle: milliseconds between the
    result of each round and the launch of the next."""

    idle: ClassVar[list[float]] = []

    def __init__(self, rounds: RoundExecutor, key: RoundKey) -> None:
        assert isinstance(rounds.source, LookupChains)
        self.drafts = rounds.source.buffer[:, : key.num_steps]
        self.rounds = rounds

    def replay(self) -> None:
        if Clock.done_at is not None:
            self.idle.append(1000 * (perf_counter() - Clock.done_at))
        state, emitted = self.rounds.state, self.rounds.rows[:, None] * 7 + 11
        state.turn.fill_(1 - int(state.turn))
        outcomes = state.outcomes[int(state.turn), : len(emitted)]
        outcomes[:, 1 : self.drafts.shape[1] + 2] = emitted
        outcomes[:, 0] = (self.drafts == emitted).long().cumprod(1).sum(1)


def measure(algorithm: str, requests: int, num_steps: int, repeats: int) -> dict[str, Any]:
    spec = SpecConfig(algorithm=algorithm, num_draft_tokens=num_steps + 1, adaptive=False)
    llm = engine_of(requests, 2 * requests * (PROMPT + NEW), spec, Repeating, new_event=Clock)
    draw = random.Random(0)
    spent, drafter = [0.0], llm.engine.drafter

    def timed(draft: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*given: Any) -> Any:
            start = perf_counter()
            try:
                return draft(*given)
            finally:
                spent[0] += 1000 * (perf_counter() - start)

        return asked

    for name in ("draft", "draft_ahead"):
        if hasattr(drafter, name):
            setattr(drafter, name, timed(getattr(drafter, name)))
    milliseconds(llm, requests, draw)
    rounds, drafting, idle = [], [], []
    with frozen_objects():
        for _ in range(repeats):
            spent[0], Clock.done_at = 0.0, None
            Repeating.idle.clear()
            times = milliseconds(llm, requests, draw)
            count = 1 + len(Repeating.idle)
            rounds.append(sum(times[1:]) / count)
            drafting.append(spent[0] / count)
            idle.append(statistics.fmean(Repeating.idle))
    found = {"round ms": min(rounds), "of it drafting ms": min(drafting), "idle ms": min(idle)}
    return {"drafter": algorithm, "requests": requests, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=["NGRAM", "SUFFIX"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    rows = []
    for algorithm in args.algorithms:
        for requests in args.requests:
            rows.append(measure(algorithm, requests, args.num_steps, args.repeats))
            print(rows[-1], flush=True)
    notes = f"The best of {args.repeats} runs, each figure by itself."
    print(report.write("host-time", "lookup-drafts", "Drafts looked up in the text", rows, notes))


if __name__ == "__main__":
    main()
