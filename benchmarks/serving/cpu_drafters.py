"""SmolLM2 on a CPU with each drafter: tokens a second of processor time, on the demo's prompts.

    OMP_NUM_THREADS=1 python benchmarks/serving/cpu_drafters.py --name cpu-drafters

Processor time of one thread, not wall time, so that it can be measured beside other work. Decoding
alone: from the first token of an answer to its last, the best of several answers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import SamplingParams, SpecConfig
from specengine.cli.demo import PROMPTS
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import build_engine, load
from specengine.engine.chat_template import render_chat
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases

SETTINGS = {
    "plain": None,
    "NGRAM": SpecConfig(algorithm="NGRAM"),
    "EAGLE3, chain of 3": SpecConfig(algorithm="EAGLE3", num_steps=3),
    "EAGLE3, chain of 5": SpecConfig(algorithm="EAGLE3", num_steps=5),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
NOTES = """
tok/s is per second of processor time of one thread, decoding alone (prefill excluded), greedy, one
request at a time, the best of the repeats; settings took turns on each prompt. `speed-up` is
against plain decoding of the same weights and prompt. tau is the accepted length: tokens a round
emits, the bonus token included. `same`: the tokens are those of plain decoding; int8 and int4
round differently with the number of rows, so that near-ties may fall otherwise.
"""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds_per_token: float
    tau: float


def answer(engine: Engine, prompt: list[int], max_tokens: int) -> Answer:
    engine.add_request("one", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    first: float | None = None
    while True:
        outputs = engine.step()
        now = process_time()
        for output in outputs:
            first = now if first is None else first
            if output.finish_reason is not None:
                seconds = (now - first) / max(len(output.token_ids) - 1, 1)
                return Answer(output.token_ids, seconds, output.spec.mean_acceptance_length)


def measure(weights: str, max_tokens: int, repeats: int) -> list[dict[str, Any]]:
    flags = {"model": "smollm2", "max_total_tokens": 2048, "device": "cpu", **WEIGHTS[weights]}
    loaded = load(config_from_flags(flags), Phases())
    engines = {
        name: build_engine(config_from_flags(flags, spec), loaded)
        for name, spec in SETTINGS.items()
    }
    rows = []
    for title, text in PROMPTS.items():
        prompt = render_chat(loaded.tokenizer, [{"role": "user", "content": text}])
        runs: dict[str, list[Answer]] = {name: [] for name in engines}
        for _ in range(repeats):
            for name, engine in engines.items():
                runs[name].append(answer(engine, prompt, max_tokens))
        best = {name: min(a.seconds_per_token for a in answers) for name, answers in runs.items()}
        plain = runs["plain"][0].tokens
        for name, (one, *_) in runs.items():
            rows.append(
                {
                    "weights": weights,
                    "prompt": title,
                    "setting": name,
                    "tokens": len(one.tokens),
                    "tok/s": 1 / best[name],
                    "speed-up": best["plain"] / best[name],
                    "tau": one.tau if name != "plain" else "",
                    "same": "yes" if one.tokens == plain else "no",
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--name", help="name of the table in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for weights in args.weights:
        rows += measure(weights, args.max_tokens, args.repeats)
    if args.name is not None:
        report.write("cpu", args.name, "SmolLM2 on a CPU with each drafter", rows, NOTES)


if __name__ == "__main__":
    main()
