"""Accepted length of the drafters without a model, on real prompts, greedy, through the engine.

    python benchmarks/acceptance/model_free.py --prompts mt_bench.jsonl humaneval.jsonl

A prompt file has one JSON object a line; the first of its `turns` is asked. Greedy output is the
same whoever drafts, so the drafters compare on equal text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.request import SpecStats
from specengine.engine.chat_template import render_chat
from specengine.engine.outputs import add_stats

NOTES = """
tau is the accepted length: tokens emitted a round, the bonus token included = 1 + accepted /
rounds, micro-averaged over the prompts of a set. `drafted` counts drafted tokens a round,
`accepted` the share of them that stood. Drafts of a shared corpus see the outputs of the prompts
before them, in the order of the sets. Speed was not measured.
"""


@dataclass(frozen=True)
class PromptSet:
    name: str
    token_ids: list[list[int]]


@dataclass
class Contender:
    name: str
    options: dict[str, Any]
    totals: dict[str, SpecStats] = field(default_factory=dict)  # by prompt set


def contenders() -> Iterator[Contender]:
    yield Contender("NGRAM", {"algorithm": "NGRAM"})
    yield Contender("NGRAM, 3 branches", {"algorithm": "NGRAM", "ngram_branches": 3})
    yield Contender("NGRAM, min match 1", {"algorithm": "NGRAM", "ngram_min_match": 1})
    yield Contender("SUFFIX", {"algorithm": "SUFFIX"})
    yield Contender("SUFFIX, 3 branches", {"algorithm": "SUFFIX", "suffix_branches": 3})
    yield Contender("SUFFIX, factor 4", {"algorithm": "SUFFIX", "suffix_factor": 4.0})
    shared = {"algorithm": "SUFFIX", "suffix_shared_corpus": True}
    yield Contender("SUFFIX, shared corpus", shared)


def read_prompts(path: Path, count: int, tokenizer: Any) -> PromptSet:
    """`count` prompts spread evenly over the file, which may be sorted by category."""
    lines = path.read_text(encoding="utf-8").splitlines()
    spread = lines[:: max(1, len(lines) // count)][:count]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in spread]
    return PromptSet(path.stem, [render_chat(tokenizer, chat) for chat in chats])


def run(llm: LLM, contender: Contender, sets: list[PromptSet], params: SamplingParams) -> None:
    for one in sets:
        total = contender.totals[one.name] = SpecStats()
        for generation in llm.generate(one.token_ids, params, progress=False):
            add_stats(total, generation.spec)


def row(contender: Contender, set_name: str, total: SpecStats) -> dict[str, Any]:
    return {
        "drafter": contender.name,
        "prompts": set_name,
        "tau": total.mean_acceptance_length,
        "drafted": total.num_draft_tokens / total.num_steps,
        "accepted": total.draft_acceptance_rate,
        "rounds": total.num_steps,
    }


def rows_of(contender: Contender) -> list[dict[str, Any]]:
    everything = SpecStats()
    for total in contender.totals.values():
        add_stats(everything, total)
    named = [*contender.totals.items(), ("all", everything)]
    return [row(contender, name, total) for name, total in named]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=10, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--batch-size", type=int, default=10)
    args = parser.parse_args()
    flags = {
        "quantization": args.quantization,
        "max_running_requests": args.batch_size,
        "max_total_tokens": args.batch_size * 2048,
    }
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0.0)
    rows: list[dict[str, Any]] = []
    for contender in contenders():
        spec = SpecConfig(num_draft_tokens=args.draft_tokens, **contender.options)
        llm = LLM(args.model, spec=spec, **flags)
        sets = [read_prompts(path, args.count, llm.tokenizer) for path in args.prompts]
        run(llm, contender, sets, params)
        rows += rows_of(contender)
        print("\n".join(report.table(rows[-len(sets) - 1 :])), flush=True)
    title = f"Drafters without a model: {args.model}, {args.count} prompts a set, greedy"
    notes = f"{NOTES.strip()}\nNodes a round, the root included: at most {args.draft_tokens}.\n"
    print(report.write("model-free-acceptance", title, rows, notes))


if __name__ == "__main__":
    main()
