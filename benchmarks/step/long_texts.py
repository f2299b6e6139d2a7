"""Rounds of requests with long texts: what they take at each depth, and which depth is chosen.

    python benchmarks/step/long_texts.py

Weights are random, the accepted length is forced, and prompts are in the prefix cache: answers take
what their rounds take. "cost table": seconds of a round by the table of costs, at the length that
requests had last.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.state import DepthChooser
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.runner.loader.source import resolve_model

DEPTHS = (0, 1, 2, 3)
NEW_TOKENS = 128
CASES = ["1.3,64,4096", "1.6,128,2000", "2.5,64,280"]  # accepted length, requests, prompt


@contextmanager
def held(depths: DepthChooser, num_steps: int | None, took: list[float]) -> Iterator[None]:
    """All rounds are so deep; None lets the engine choose. took: filled with their seconds."""
    decision, observe = DepthChoice(num_steps or 0, "held", None), depths.observe

    def note(observation: RoundObservation) -> None:
        if observation.seconds is not None:
            took.append(observation.seconds)
        observe(observation)

    choose = depths.choose if num_steps is None else lambda batch_size: decision
    with patch.object(depths, "choose", choose), patch.object(depths, "observe", note):
        yield


def case_rows(model: str, folder: str, case: str, repeats: int) -> Iterator[dict[str, Any]]:
    length, requests, prompt = case.split(",")
    spec = SpecConfig(
        algorithm="EAGLE3",
        draft_model_path=folder,
        num_steps=DEPTHS[-1],
        simulate_accept_length=float(length),
    )
    llm = LLM(model, spec, load_format="dummy")
    pipeline = llm.engine.pipeline
    assert pipeline is not None, "without a GPU there are no rounds in graphs"
    assert pipeline.depths.chooser is not None
    depths, dice = pipeline.depths.chooser, random.Random(7)
    prompts = [[dice.randrange(30000) for _ in range(int(prompt))] for _ in range(int(requests))]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    llm.generate(prompts, params, progress=False)
    for depth in (*DEPTHS, None):
        times, took = [], list[float]()
        for _ in range(repeats):
            start = perf_counter()
            with held(depths, depth, took):
                llm.generate(prompts, params, progress=False)
            times.append(perf_counter() - start)
        thought = depths.costs.of(int(requests), depth or 0)
        yield {
            "accepted length": float(length),
            "requests": int(requests),
            "prompt": int(prompt),
            "depth": "chosen" if depth is None else depth,
            "answers ms": 1e3 * min(times),
            "round us": 1e6 * median(took) if took else None,
            "cost table us": None if depth is None or thought is None else 1e6 * thought,
            "choice": depths.current.reason if depth is None and depths.current else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-shape")
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        target = resolve_model(ModelConfig(model=args.model, load_format="dummy"))
        write_random_eagle3(Path(folder), target.hf_config, args.draft_vocab)
        for case in args.cases:
            for row in case_rows(args.model, folder, case, args.repeats):
                rows.append({"model": args.model, **row})
                print(rows[-1], flush=True)
    print(report.write("long-contexts", "long-texts", "By depth", rows))


if __name__ == "__main__":
    main()
