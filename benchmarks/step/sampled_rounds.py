"""Tokens a second of sampled requests, with rounds in one graph and in plain decoding.

    python benchmarks/step/sampled_rounds.py

Weights are random, so that logits are nearly flat: the dearest case of top-p. Accepted length is
forced.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.runner.loader.source import resolve_model

NEW_TOKENS = 256
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-shape")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 64])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target = resolve_model(ModelConfig(model=args.model, load_format="dummy"))
        write_random_eagle3(Path(folder), target.hf_config, 16384)
        forced = {"adaptive": False, "num_steps": 3, "simulate_accept_length": 2.5}
        specs = {
            "none": SpecConfig(),
            "EAGLE3": SpecConfig(algorithm="EAGLE3", draft_model_path=folder, **forced),
        }
        for name, spec in specs.items():
            for row in measure(args, spec):
                rows.append({"drafts": name, **row})
                print(rows[-1], flush=True)
    notes = f"""{args.model}, random weights, prompts of 30 tokens, {NEW_TOKENS} new ones, chains of
3 with 2.5 tokens a round forced, tokens a second, best of 3 runs."""
    print(report.write("rounds", "sampled-rounds", "Sampled requests", rows, notes))


def measure(args: argparse.Namespace, spec: SpecConfig) -> list[dict[str, Any]]:
    llm = LLM(
        args.model,
        spec,
        load_format="dummy",
        max_total_tokens=131072,
        cuda_graph_bs=tuple(args.batch_sizes),
    )
    rows = []
    for name, given in SAMPLING.items():
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=1, **given)
        row: dict[str, Any] = {"requests": name}
        for size in args.batch_sizes:
            tokens_a_second(llm, size, sampling)
            row[f"batch {size}"] = max(tokens_a_second(llm, size, sampling) for _ in range(3))
        rows.append(row)
    return rows


def tokens_a_second(llm: LLM, size: int, sampling: SamplingParams) -> float:
    dice = random.Random(0)
    prompts = [[dice.randrange(2000) for _ in range(30)] for _ in range(size)]
    start = perf_counter()
    llm.generate(prompts, sampling, progress=False)
    return round(size * NEW_TOKENS / (perf_counter() - start))


if __name__ == "__main__":
    main()
