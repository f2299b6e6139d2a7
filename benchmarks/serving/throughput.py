"""Offline output tokens per second by batch size: 30-token prompts, 256 new tokens, best of 3.

    python benchmarks/serving/throughput.py --model smollm2-shape --batch-sizes 1 8 64 \
        --flags load_format=dummy
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig


def measure(llm: LLM, batch_size: int, prompt_len: int, new_tokens: int, repeats: int) -> float:
    """Best output tok/s of `repeats` runs. Prompts differ between runs: no prefix-cache hits."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    rng = random.Random(batch_size)
    best = 0.0
    for _ in range(repeats + 1):  # the first warms up
        prompts = [[rng.randrange(2000) for _ in range(prompt_len)] for _ in range(batch_size)]
        start = perf_counter()
        results = llm.generate(prompts, params, progress=False)
        seconds = perf_counter() - start
        assert all(len(result.token_ids) == new_tokens for result in results)
        best = max(best, batch_size * new_tokens / seconds)
    return best


def fields(given: list[str]) -> dict[str, Any]:
    """name=value, the values as YAML reads them."""
    return {name: yaml.safe_load(value) for name, value in (one.split("=", 1) for one in given)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-len", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spec", nargs="*", default=[], help="SpecConfig fields as name=value")
    parser.add_argument("--flags", nargs="*", default=[], help="engine flags as name=value")
    parser.add_argument("--name", default="throughput")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    flags, spec_fields = fields(args.flags), fields(args.spec)
    spec = SpecConfig(**spec_fields) if spec_fields else None
    start = perf_counter()
    llm = LLM(args.model, spec=spec, **flags)
    started = perf_counter() - start
    rows = []
    for size in args.batch_sizes:
        rate = measure(llm, size, args.prompt_len, args.new_tokens, args.repeats)
        rows.append({"model": args.model, "batch size": size, "output tok/s": rate})
        print(rows[-1], flush=True)
    notes = f"Start-up {started:.1f} s. Speculation: {spec_fields or 'none'}. Flags: {flags}."
    print(report.write(args.name, "Offline throughput", rows, notes))


if __name__ == "__main__":
    main()
