"""What rounds of a mixture of experts cost by depth, and which depth that makes the best.

    python -m benchmarks.step.mixture_costs [--model SHAPE] [--layers 12] [--batch-sizes 1 8 64]

More tokens that are verified wake more experts, as far as they differ. So the engine times the
rounds among which it chooses on requests whose last tokens differ ("cost table": what it measured
when it started). Beside them: the same graphs timed here, on tokens that differ and on one token
for all requests; the experts that a layer then reads; and what rounds of requests take at each
depth. Then the best depth by the accepted length that the deepest draft would have, each draft
being as likely to be accepted; by either costs, and what the wrong ones lose.

Random weights, and a random EAGLE-3 draft. The first layers of a shape alone. Replaces its tables.
Takes under a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

from benchmarks.peers.checkpoint import first_layers
from benchmarks.peers.chosen_experts import Choices
from benchmarks.step.long_texts import held
from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.costs import Curve
from specengine.engine.adaptive.estimate import Estimate, estimate, expected_tokens
from specengine.engine.round import timing
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.timing import seconds_of
from specengine.lab.environment import environment
from specengine.lab.throughput.random_draft import random_eagle3
from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.source import resolve_model

LENGTHS = (1.3, 2.0, 3.0, 4.0)
PROMPT, NEW_TOKENS = 30, 96
FORCED = 2.0  # accepted length of rounds of requests

Costs = dict[int, Curve]  # seconds by batch size and num_steps
Rows = list[dict[str, Any]]


@contextmanager
def cut_shape(name: str, layers: int) -> Iterator[str]:
    """The name of a shape of the first layers of another, while it lasts."""
    whole = BUILTIN_MODELS[name]
    cut = replace(whole, name=f"{name}-{layers}", config=first_layers(whole.config, layers))
    with patch.dict(BUILTIN_MODELS, {cut.name: cut}):
        yield cut.name


def one_token(rounds: RoundExecutor, batch_size: int) -> None:
    """In place of timing's tokens that differ."""
    rounds.state.roots.zero_()


def experts_and_seconds(
    rounds: RoundExecutor, choices: Choices, batch_size: int, num_steps: int
) -> dict[str, tuple[float, float]]:
    """Experts that a layer reads, the mean, and seconds of a round: of tokens that differ, and of
    one token."""
    key = rounds.plain_key(batch_size, num_steps)
    found, differing = dict[str, tuple[float, float]](), timing._pretend_tokens
    rounds.captured.pop(key, None)  # captured before choices were recorded
    choices.ids.clear()
    with choices.recorded():
        for name, tokens in (("differ", differing), ("one token", one_token)):
            with patch.object(timing, "_pretend_tokens", tokens):
                seconds = seconds_of(rounds, batch_size, num_steps)
            found[name] = fmean(choices.read().tolist()), seconds
    choices.ids.clear()
    return found


def cost_rows(rounds: RoundExecutor, choices: Choices, table: Costs) -> tuple[Rows, Costs, Costs]:
    """A row a batch size and depth; and the costs of tokens that differ, and of one token. table:
    what the engine measured."""
    rows, differ, alike = Rows(), Costs(), Costs()
    for batch_size in rounds.batch_sizes:
        differ[batch_size], alike[batch_size] = {}, {}
        for num_steps in rounds.steps:
            found = experts_and_seconds(rounds, choices, batch_size, num_steps)
            (experts, seconds), (few, less) = found["differ"], found["one token"]
            differ[batch_size][num_steps], alike[batch_size][num_steps] = seconds, less
            known = table.get(batch_size, {}).get(num_steps)
            row = {
                "requests": batch_size,
                "K": num_steps,
                "cost table us": None if known is None else known * 1e6,
                "tokens differ us": seconds * 1e6,
                "experts read": experts,
                "one token us": less * 1e6,
                "experts read of it": few,
            }
            rows.append(row)
            print(row, flush=True)
    return rows, differ, alike


def chance_of(length: float, depth: int) -> float:
    """Of each draft to be accepted, so that a round of the deepest draft gives so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_less = expected_tokens([middle] * depth)[-1] < length
        low, high = (middle, high) if is_less else (low, middle)
    return (low + high) / 2


def estimate_of(batch_size: int, curve: Curve, chance: float) -> Estimate:
    chances = {None: [chance] * max(curve)}
    seconds = {DraftShape(num_steps): one for num_steps, one in curve.items()}
    return estimate(batch_size, chances, 1.0, seconds)


def choice_rows(differ: Costs, alike: Costs, lengths: Sequence[float] = LENGTHS) -> Rows:
    """A row a batch size and accepted length."""
    rows = Rows()
    for batch_size, curve in differ.items():
        for length in lengths:
            chance = chance_of(length, max(curve))
            right = estimate_of(batch_size, curve, chance)
            wrong = estimate_of(batch_size, alike[batch_size], chance)
            lost = 1 - right.rates[wrong.best] / right.rates[right.best]
            rows.append(
                {
                    "requests": batch_size,
                    "accepted length": length,
                    "chance of a draft": chance,
                    "K": right.best.num_steps,
                    "of plain": right.gain(right.best),
                    "K by one token": wrong.best.num_steps,
                    "that would be, of plain": right.gain(wrong.best),
                    "promised by one token": wrong.gain(wrong.best),
                    "lost by it": lost,
                }
            )
            print(rows[-1], flush=True)
    return rows


def time_requests(llm: LLM, rows: Rows) -> None:
    """Adds what rounds of requests take at each depth, the median."""
    pipeline = llm.engine.pipeline
    assert pipeline is not None, "without a GPU there are no rounds in graphs"
    assert pipeline.depths.chooser is not None
    depths, dice = pipeline.depths.chooser, random.Random(7)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for row in rows:
        vocab = llm.engine.parts.worker.runner.model.vocab_size
        prompts = [[dice.randrange(vocab) for _ in range(PROMPT)] for _ in range(row["requests"])]
        took = list[float]()
        with held(depths, row["K"], took):
            llm.generate(prompts, params, progress=False)
        row["of requests us"] = 1e6 * median(took) if took else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b-shape")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="of the deepest draft")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    with cut_shape(args.model, args.layers) as name:
        target = resolve_model(ModelConfig(model=name, load_format="dummy"))
        with random_eagle3(target.hf_config, args.draft_vocab) as folder:
            spec = SpecConfig(
                algorithm="EAGLE3",
                draft_model_path=str(folder),
                num_steps=args.steps,
                simulate_accept_length=FORCED,
            )
            llm = LLM(
                name,
                spec,
                load_format="dummy",
                cuda_graph_bs=tuple(args.batch_sizes),
                max_running_requests=max(args.batch_sizes),
            )
    rounds, pipeline = llm.engine.device_rounds, llm.engine.pipeline
    assert rounds is not None, "without a GPU there are no rounds in graphs"
    assert pipeline is not None
    assert pipeline.depths.chooser is not None
    table = pipeline.depths.chooser.costs
    model: Any = rounds.runner.model
    print(f"depths {rounds.steps}, batch sizes {rounds.batch_sizes}", flush=True)
    rows, differ, alike = cost_rows(rounds, Choices(model), getattr(table, "seconds", {}))
    chosen = choice_rows(differ, alike)
    time_requests(llm, rows)
    if args.json is not None:
        found = {"environment": environment(), "costs": rows, "choices": chosen}
        args.json.write_text(json.dumps(found, indent=1))
    about = f"{args.model}, {args.layers} layers. {NOTES}"
    print(report.write("adaptive", "mixture-costs", "A mixture of experts by depth", rows, about))
    title = "Depths that the costs of a mixture make the best"
    print(report.write("adaptive", "mixture-choices", title, chosen, ABOUT_CHOICES))


NOTES = """
Random weights, a random EAGLE-3 draft, chains, bfloat16, a round's time on the device. cost table:
what the engine measured when it started, by which it chooses. tokens differ, one token: the same
graphs timed again, on requests whose last tokens differ, and on one token for all. experts read:
the mean of a layer. of requests: the median between rounds of requests, with prompts of 30 tokens,
an accepted length of 2 forced.
"""
ABOUT_CHOICES = """
The depth with the most tokens a second by the measured costs, where the deepest draft would have
this accepted length and each draft the same chance. "by one token": by costs that were measured on
one token for all requests, and what that depth really gives. A batch of 1 has one token either way.
"""


if __name__ == "__main__":
    main()
