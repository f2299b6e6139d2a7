"""The engine against transformers' generate on CPU: one process, same threads, same prompts.

    OMP_NUM_THREADS=2 python benchmarks/serving/cpu_decode.py

Ratios are taken pair by pair, runs of both in turn, so that a machine whose speed drifts does not
decide the result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig

CHAT = "Explain in a few paragraphs how a bicycle stays upright, and why riders lean into turns."
REPEAT = (
    "Repeat the following list exactly, line by line, three times, and write nothing else.\n"
    + "\n".join(
        f"{i}. item number {i} of the shopping list costs {i * 3} dollars" for i in range(8)
    )
)

VERSE = "The wheels on the bus go round and round, all through the town, all day long.\n"


WEIGHTS = ["float32", "bfloat16", "int8", "int4"]


@dataclass
class Contender:
    name: str
    run: Callable[[], int]  # returns the tokens it made
    seconds_per_token: list[float]
    taus: list[float] = field(default_factory=list)


def transformers_run(model: Any, ids: list[int], new_tokens: int) -> Callable[[], int]:
    prompt = torch.tensor([ids])

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        return int(out.shape[1] - prompt.shape[1])

    return run


def engine_run(llm: LLM, prompts: list[list[int]], new_tokens: int, tau: list[float]) -> Any:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    def run() -> int:
        results = llm.generate(prompts, params, progress=False)
        tau.append(results[0].spec.mean_acceptance_length)
        return sum(len(result.token_ids) for result in results)

    return run


def race(contenders: list[Contender], rounds: int) -> None:
    for number in range(rounds + 1):
        for one in contenders:
            start = perf_counter()
            tokens = one.run()
            if number:  # the first round warms up
                one.seconds_per_token.append((perf_counter() - start) / tokens)


def ratio(base: Contender, other: Contender) -> float:
    pairs = zip(base.seconds_per_token, other.seconds_per_token, strict=True)
    return statistics.median(b / o for b, o in pairs)


def render(llm: LLM, text: str) -> list[int]:
    from specengine.engine.chat_template import render_chat

    return render_chat(llm.tokenizer, [{"role": "user", "content": text}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, choices=WEIGHTS)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from specengine.core.config import ModelConfig
    from specengine.runner.loader.source import resolve_model

    directory = resolve_model(ModelConfig(model="smollm2")).directory
    rows: list[dict[str, Any]] = []
    ngram = SpecConfig(algorithm="NGRAM", num_draft_tokens=args.draft_tokens, adaptive=False)
    for weights in args.weights:
        quantization = weights if weights.startswith("int") else None
        dtype = "auto" if quantization else weights
        reference_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=reference_dtype).eval()
        flags = {"dtype": dtype, "quantization": quantization, "max_total_tokens": 16384}
        plain, spec = LLM("smollm2", **flags), LLM("smollm2", spec=ngram, **flags)
        chat, repeat = render(plain, CHAT), render(plain, REPEAT)
        eight = [render(plain, f"{CHAT} Answer number {i}.") for i in range(8)]
        count = args.new_tokens
        base = Contender("transformers", transformers_run(reference, chat, count), [])
        ours = Contender("plain, batch 1", engine_run(plain, [chat], count, []), [])
        batch = Contender("plain, batch 8", engine_run(plain, eight, count, []), [])
        verses = plain.tokenizer(VERSE * 4)["input_ids"]
        pairs = [(ours, base), (batch, ours)]
        for title, ids in (("a list to repeat", repeat), ("a verse that repeats", verses)):
            taus: list[float] = []
            text = Contender(f"plain, {title}", engine_run(plain, [ids], 2 * count, []), [])
            fast = Contender(f"NGRAM, {title}", engine_run(spec, [ids], 2 * count, taus), [], taus)
            pairs += [(text, base), (fast, text)]
        race([base, *[one for one, _ in pairs]], args.rounds)
        for one, against in [(base, base), *pairs]:
            rows.append(
                {
                    "weights": weights,
                    "run": one.name,
                    "tok/s": 1 / statistics.median(one.seconds_per_token),
                    "against": against.name,
                    "ratio": ratio(against, one),
                    "tau": one.taus[-1] if one.taus else "",
                }
            )
            print(rows[-1], flush=True)
    notes = (
        "Whole-request output tokens per second, prefill included; greedy, batch 1 unless named. "
        "`ratio` is the median of the pairwise ratios to the run named under `against`. tau is the "
        "accepted length: tokens emitted a round, the bonus token included. NGRAM verifies "
        f"{args.draft_tokens} nodes a round, the root included."
    )
    print(report.write("cpu", "cpu-decode", "Decoding SmolLM2-135M on CPU", rows, notes))


if __name__ == "__main__":
    main()
