"""The CPU's part of rounds whose drafts the device makes: none, always three, and as many as the
adaptive choice takes.

    OMP_NUM_THREADS=1 python benchmarks/step/drafting_rounds.py

The engine runs such rounds as on a GPU, but their results are drawn beforehand: no model is run,
tokens are random, and a draft is accepted with a chance of 0.9 at each position. Each request has
a prompt of 30 tokens and 256 new ones. No GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from host_steps import NEW, PROMPT, engine_of, milliseconds

from specengine import LLM, SpecConfig
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.garbage import frozen_objects
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import RoundKey

STEPS, CHANCE = 3, 0.9
KINDS = ("no drafter", "K=3", "chosen")


class DrawnOutcomes:
    """The graph of a round with drafts. Replaying it takes hardly any time."""

    def __init__(self, rounds: RoundExecutor, key: RoundKey) -> None:
        draw, shape = torch.Generator().manual_seed(1), (64, key.batch_size)
        self.state, self.places = rounds.state, (key.batch_size, key.num_steps + 2)
        vocab = rounds.runner.model.vocab_size
        self.outcomes = torch.randint(2, vocab, (*shape, self.places[1]), generator=draw)
        accepted = torch.rand(*shape, key.num_steps, generator=draw) < CHANCE
        self.outcomes[:, :, 0] = accepted.long().cumprod(-1).sum(-1)

    def replay(self) -> None:
        turn = 1 - int(self.state.turn)
        self.state.turn.fill_(turn)
        requests, columns = self.places
        self.state.outcomes[turn, :requests, :columns] = random.choice(self.outcomes)


def engine(kind: str, requests: int) -> LLM:
    spec = None if kind == KINDS[0] else SpecConfig(algorithm="EAGLE3", num_steps=STEPS)
    chooses = kind == KINDS[2]
    llm = engine_of(requests, 4 * requests * (PROMPT + NEW), spec, DrawnOutcomes, chooses)
    if chooses:
        costs = StepCosts(
            {n: {0: 57e-6, STEPS: 150e-6} for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
        )
        steps = DepthChooser([0, STEPS], costs, host=HostSeconds(), pads=True)
        parts, rounds = llm.engine.parts, llm.engine.device_rounds
        assert rounds is not None
        llm.engine.pipeline = RoundPipeline(
            rounds, parts.drafter, parts.scheduler, steps, overlaps=True
        )
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for requests in args.requests:
        for kind in KINDS:
            llm, draw = engine(kind, requests), random.Random(0)
            milliseconds(llm, requests, draw)
            with frozen_objects():
                runs = [milliseconds(llm, requests, draw) for _ in range(args.repeats)]
            best = min(runs, key=sum)
            found = {"all ms": sum(best), "steps": len(best), "usual us": 1e3 * median(best)}
            rows.append({"requests": requests, "drafts": kind, **found})
            print(rows[-1], flush=True)
    notes = f"The best of {args.repeats} answers. Steps: rounds, and the one that reads prompts."
    print(report.write("host-time", "drafting-rounds", "Rounds with drafts", rows, notes))


if __name__ == "__main__":
    main()
