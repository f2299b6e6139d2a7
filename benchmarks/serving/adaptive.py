"""--speculative-adaptive beside plain decoding and beside a fixed depth, in turns.

    OMP_NUM_THREADS=1 python benchmarks/serving/adaptive.py --model tiny

Text is sampled at temperature 1, so that it repeats little and drafts of it stand seldom. The ratio
is the median over repeats of pairs that run one after the other.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.accept.speed import Speed, SpeedPlan, measure_speed

PROMPTS = [
    "Explain why the sky is blue.",
    "Tell me a story about a lighthouse keeper and a storm.",
    "What should I pack for a week in the mountains?",
    "Describe how bread is made, from grain to loaf.",
    "Who invented the telescope, and what was it used for?",
    "Give me advice on learning to play the cello.",
    "What is the difference between weather and climate?",
    "Write a letter to a friend who has moved to another town.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--algorithms", nargs="+", default=["NGRAM", "STANDALONE", "EAGLE3", "MTP"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(model=args.model), memory=MemoryConfig(max_total_tokens=16384)
    )
    loaded = load(config, Phases())
    plain = build_engine(config, loaded)
    rows: list[dict[str, Any]] = []
    for algorithm in args.algorithms:
        for is_adaptive in (True, False):
            spec = SpecConfig(algorithm=algorithm, adaptive=is_adaptive)
            engine = build_engine(replace(config, spec=spec), loaded)
            for size in args.batch_sizes:
                rows.append(row(engine, plain, size, args) | {"algorithm": algorithm})
                print(rows[-1], flush=True)
    notes = (
        f"{args.model}, {len(PROMPTS)} prompts, temperature 1, {args.new_tokens} new tokens each; "
        f"{args.repeats} repeats in turns. `ratio` is to plain decoding, prefill included, median; "
        "`tau` is over the last repeat. `stands` is what stood at the end."
    )
    print(report.write(f"adaptive-{args.model}", "Depth of drafts by cost", rows, notes))


def row(engine: Engine, plain: Engine, size: int, args: argparse.Namespace) -> dict[str, Any]:
    speed = measure(engine, plain, size, args)
    depth = engine.stats().depth
    return {
        "algorithm": "",
        "depth": "fixed" if engine.parts.adaptive is None else "adaptive",
        "batch": size,
        "plain tok/s": sorted(speed.plain)[len(speed.plain) // 2],
        "ratio": speed.ratio,
        "lowest": min(speed.ratios),
        "highest": max(speed.ratios),
        "tau": speed.tau,
        "stands": "" if depth is None else depth.reason,
    }


def measure(engine: Engine, plain: Engine, size: int, args: argparse.Namespace) -> Speed:
    params = SamplingParams(max_tokens=args.new_tokens, temperature=1.0, seed=1, ignore_eos=True)
    prompts = [list(plain.parts.tokenizer(text)["input_ids"]) for text in PROMPTS]
    plan = SpeedPlan(batch_size=size, repeats=args.repeats)
    return measure_speed(engine, plain, prompts, params, plan, lambda _: None)


if __name__ == "__main__":
    main()
