"""What a request with a grammar costs its neighbours: a batch without one, one whose rounds run on
the device, and one whose rounds run on the host.

    python benchmarks/step/grammar_neighbour.py

Weights are random, so that next to nothing of a draft is accepted: look at the time of a round.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.loop import Engine
from specengine.lab.throughput.random_draft import random_eagle3
from specengine.runner.loader.source import resolve_model

NEW_TOKENS = 256
FREE = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
# A text that goes on for as long as it may.
ENDLESS = GrammarSpec.json_schema(
    {"type": "array", "items": {"type": "string"}, "minItems": NEW_TOKENS}
)
CONSTRAINED = replace(FREE, grammar=ENDLESS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-shape")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--load-format", default="dummy")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    named = ModelConfig(model=args.model, load_format=args.load_format)
    config = resolve_model(named).hf_config
    with random_eagle3(config, min(16384, config.vocab_size)) as folder:
        eagle3 = SpecConfig(
            algorithm="EAGLE3", adaptive=False, draft_model_path=str(folder), num_steps=3
        )
        for name, spec in {"no speculation": None, "EAGLE3 chain of 3": eagle3}.items():
            for row in measure(args, spec):
                rows.append({"drafts": name, **row})
                print(rows[-1], flush=True)
    notes = (
        f"{args.model}, random weights, {NEW_TOKENS} new tokens, greedy, prefill included, best "
        "of 3. The grammar: a JSON list of strings."
    )
    print(
        report.write(
            "rounds", "grammar-neighbour", "Requests beside one with a grammar", rows, notes
        )
    )


def measure(args: argparse.Namespace, spec: SpecConfig | None) -> Iterator[dict[str, Any]]:
    llm = LLM(
        args.model,
        spec,
        load_format=args.load_format,
        max_total_tokens=131072,
        cuda_graph_bs=tuple(args.batch_sizes),
    )
    let_end(llm.engine)
    assert llm.engine.pipeline is not None, "without a GPU there are no rounds in graphs"
    for size in args.batch_sizes:
        free = [FREE] * (size - 1)
        for batch, last, on_host in (
            ("none", FREE, False),
            ("one, in a captured round", CONSTRAINED, False),
            ("one, in rounds on the host", CONSTRAINED, True),
        ):
            with rounds_on_host(llm.engine) if on_host else nullcontext():
                once(llm, [*free, last])
                best = min((once(llm, [*free, last]) for _ in range(3)), key=lambda row: row["ms"])
            yield {"batch": size, "grammars": batch, **best}


def rounds_on_host(engine: Engine) -> AbstractContextManager[object]:
    return patch.object(engine, "_runs_on_device", lambda *_: False)


def let_end(engine: Engine) -> None:
    """Shapes have no token that ends a text, which grammars do not do without."""
    parts = engine.parts
    if not parts.eos_ids:
        ends = frozenset({parts.vocab_size - 1})
        grammars = GrammarCompiler(parts.tokenizer, parts.vocab_size, ends)
        engine.parts = replace(parts, grammars=grammars)


def once(llm: LLM, params: list[SamplingParams]) -> dict[str, Any]:
    """Of the requests without a grammar: the first ones."""
    dice = random.Random(0)
    prompts = [[dice.randrange(256) for _ in range(30)] for _ in params]
    torch.cuda.synchronize()
    start = perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    torch.cuda.synchronize()
    seconds = perf_counter() - start
    for one in outputs:
        assert len(one.token_ids) == NEW_TOKENS, "the grammar came to its end"
    free = outputs[:-1]
    return {
        "tok/s of those without": sum(len(one.token_ids) for one in free) / seconds,
        "ms": 1000 * seconds / max(sum(one.spec.histogram) for one in outputs),
    }


if __name__ == "__main__":
    main()
