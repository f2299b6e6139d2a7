"""The CPU's part of many requests that begin and end together, step by step.

    OMP_NUM_THREADS=1 python benchmarks/step/host_steps.py

The engine runs rounds as on a GPU, but their results are drawn at random beforehand: no model is
run. Each request has a prompt of 30 tokens and 256 new ones. Beside them the prefix cache has
filled all memory. No GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.interfaces import LogitsOutput
from specengine.core.platform import Event, Graph
from specengine.core.platforms.cpu import Passed
from specengine.core.spec import PrefillResult
from specengine.engine.garbage import frozen_objects
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.build import compose, drafted_by, make_rule
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey

PROMPT, NEW = 30, 256
SAMPLING = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
RESERVES = (2, 67, 132, 197)  # steps at which slots are reserved for the 64 rounds to come


class RandomOutcomes:
    """The graph of a round without drafts. Replaying it takes hardly any time."""

    def __init__(self, rounds: RoundExecutor, key: RoundKey) -> None:
        self.state = rounds.state
        shape, vocab = (64, *rounds.state.outcomes.shape[1:]), rounds.runner.model.vocab_size
        self.outcomes = torch.randint(0, vocab, shape)
        self.outcomes[:, :, 0] = 0  # accepted drafts

    def replay(self) -> None:
        self.state.turn.fill_(1 - int(self.state.turn))
        self.state.outcomes[int(self.state.turn)] = random.choice(self.outcomes)


def engine_of(
    requests: int,
    slots: int,
    spec: SpecConfig | None = None,
    graph_of: Callable[[RoundExecutor, RoundKey], Graph] = RandomOutcomes,
    chooses: bool = False,
    new_event: Callable[[], Event] = Passed,
) -> LLM:
    """requests: of each round. slots: of KV, in tokens. chooses: there are rounds of several
    depths."""
    flags: dict[str, int] = {"max_total_tokens": slots, "max_running_requests": requests}
    llm = LLM("tiny", spec, context_length=2048, chunked_prefill_size=-1, **flags)
    parts = llm.engine.parts
    runner = parts.worker.runner
    drafted = drafted_by(parts.drafter, requests, runner.device, chooses)
    rule = make_rule(parts.verifier, parts.drafter)
    rounds = compose(runner, drafted, rule, [requests])
    rounds.new_event = new_event
    rounds._make = lambda key: (graph_of(rounds, key), None)  # type: ignore[method-assign]
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, None, overlaps=True)
    nothing = LogitsOutput(torch.empty(0), None, torch.empty(0), None)
    parts.worker.forward_batch_generation = lambda *_: nothing  # type: ignore[method-assign]
    object.__setattr__(parts, "sample_prefill", first_tokens)
    return llm


def first_tokens(output: LogitsOutput, batch: Any, *_: Any) -> PrefillResult:
    reqs = batch.reqs
    return PrefillResult([7] * len(reqs), [None] * len(reqs), [[] for _ in reqs])


def milliseconds(llm: LLM, requests: int, draw: random.Random) -> list[float]:
    """Of each step of one batch."""
    for number in range(requests):
        prompt = [draw.randrange(2, llm.engine.parts.vocab_size) for _ in range(PROMPT)]
        llm.engine.add_request(str(number), prompt, SAMPLING, stream=False)
    times = []
    while llm.engine.has_work:
        start = perf_counter()
        llm.engine.step()
        times.append(1000 * (perf_counter() - start))
    return times


def summary(times: list[float]) -> dict[str, float]:
    usual = [one for step, one in enumerate(times) if step > 2 and step not in RESERVES]
    return {
        "first ms": times[0],
        "second ms": times[1],
        "usual ms": statistics.median(usual[:-1]),
        "reserving ms": statistics.median(times[step] for step in RESERVES),
        "last ms": times[-1],
        "all ms": sum(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--slots", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for requests in args.requests:
        llm, draw = engine_of(requests, args.slots), random.Random(0)
        allocator = llm.engine.scheduler.ledger.allocator
        while allocator.available > requests * (PROMPT + NEW):
            milliseconds(llm, requests, draw)
        with frozen_objects():
            runs = [summary(milliseconds(llm, requests, draw)) for _ in range(args.repeats)]
        row: dict[str, Any] = {"requests": requests}
        row |= {name: min(one[name] for one in runs) for name in runs[0]}
        rows.append(row)
        print(row, flush=True)
    notes = f"The best of {args.repeats} runs, each figure by itself."
    print(
        report.write(
            "host-time", "host-steps", "Many requests that begin and end together", rows, notes
        )
    )


if __name__ == "__main__":
    main()
