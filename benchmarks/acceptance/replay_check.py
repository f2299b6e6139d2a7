"""Replays beside runs: accepted length of other settings, from one trace and measured.

    python benchmarks/acceptance/replay_check.py --prompts mt_bench --data-dir DIR
    python benchmarks/acceptance/replay_check.py --prompts mt_bench --data-dir DIR --draft DIR

Records one trace with a draft at every position, replays settings within it, and runs each of them
on the same prompts. NGRAM always; EAGLE-3, chains and trees, where --draft names one. Exit status 1
where a replay is off by more than 3% and outside of its interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.spec_stats import SpecStats
from specengine.draft.replay.settings import Recorded
from specengine.draft.trace.reader import Trace
from specengine.engine.chat_template import render_chat
from specengine.engine.outputs import add_stats
from specengine.lab.accept.prompts import find_prompt_sets
from specengine.lab.replay.estimate import Row, replay

NOTES = """
tau is the accepted length: tokens emitted a round, the bonus token included = 1 + accepted /
rounds, over all prompts. `replayed` and its 95% interval (bootstrap over prompts) come from one
trace a contender, recorded at every position; `run` was measured. Speed was not measured.
"""
_TOLERANCE = 0.03


@dataclass(frozen=True)
class Contender:
    """recorded: options of the trace. others: what each setting changes."""

    name: str
    recorded: dict[str, Any]
    others: list[dict[str, Any]]


def contenders(draft: str | None) -> Iterator[Contender]:
    sizes = [{"num_draft_tokens": count} for count in (8, 6, 4, 2)]
    yield Contender("NGRAM", {"algorithm": "NGRAM", "num_draft_tokens": 8}, sizes)
    if draft is None:
        return
    eagle3 = {"algorithm": "EAGLE3", "draft_model_path": draft}
    chains = [{"num_steps": n, "num_draft_tokens": n + 1} for n in (5, 3, 1)]
    yield Contender("EAGLE3, chain", eagle3 | chains[0], chains)
    full = {"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 53}
    trees = [
        {"num_draft_tokens": 53},
        {"num_draft_tokens": 16},
        {"num_draft_tokens": 8},
        {"eagle_topk": 2, "num_draft_tokens": 12},
        {"num_steps": 3, "num_draft_tokens": 16},
    ]
    yield Contender("EAGLE3, tree", eagle3 | full, trees)


class Bench:
    def __init__(self, args: argparse.Namespace, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=0
        )
        self.flags = {
            "device": args.device,
            "dtype": args.dtype,
            "max_total_tokens": args.max_total_tokens,
        }
        self.model = args.model

    def run(self, options: dict[str, Any], **flags: Any) -> SpecStats:
        llm = LLM(self.model, SpecConfig(**options, adaptive=False), **self.flags, **flags)
        total = SpecStats()
        for generation in llm.generate(self.prompts, self.params):
            add_stats(total, generation.spec)
        for recorder in llm.engine.host_round.recorders:
            recorder.close()  # type: ignore[attr-defined]
        return total

    def compare(self, contender: Contender) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace")
            self.run(contender.recorded, trace=str(path), trace_every_position=True)
            trace = Trace.read(path)
        recorded = Recorded.of(trace.header)
        for changes in contender.others:
            named = {key.removeprefix("eagle_"): value for key, value in changes.items()}
            setting = replace(recorded.setting, **named)
            [told] = replay(trace, [setting])
            run = self.run(contender.recorded | changes)
            yield row(contender, changes, told, run.mean_acceptance_length)


def row(contender: Contender, changes: dict[str, Any], told: Row, run: float) -> dict[str, Any]:
    return {
        "drafter": contender.name,
        "setting": ", ".join(f"{key} {value}" for key, value in changes.items()),
        "replayed": told.tau.value,
        "low": told.tau.low,
        "high": told.tau.high,
        "run": run,
        "off": told.tau.value / run - 1,
        "unknown": told.unknown,
        "exact": told.is_exact,
        "holds": abs(told.tau.value / run - 1) <= _TOLERANCE
        or told.tau.low <= run <= told.tau.high,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="an EAGLE-3 drafter of it")
    parser.add_argument("--prompts", nargs="+", required=True, help="names of sets, or files")
    parser.add_argument("--data-dir", type=Path, help="where named sets lie")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-total-tokens", type=int, default=32768)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="in bfloat16 batches round differently")
    parser.add_argument("--name", help="name of the table in benchmarks/results")
    args = parser.parse_args()
    tokenizer = LLM(args.model, device=args.device, max_total_tokens=1024).tokenizer
    prompts = [
        render_chat(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for one in find_prompt_sets(args.prompts, args.data_dir)
        for prompt in one.limited(args.count).prompts
    ]
    bench = Bench(args, prompts)
    rows = []
    for contender in contenders(args.draft):
        for one in bench.compare(contender):
            print(json.dumps(one), flush=True)
            rows.append(one)
    print(NOTES)
    if args.name is not None:
        report.write("proof", args.name, "Replays beside runs", rows, NOTES)
    return 0 if all(one["holds"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
