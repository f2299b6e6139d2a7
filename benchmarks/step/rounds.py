"""Milliseconds of a round of each kind of drafter and rule: eager, with a graph a forward, with the
drafts in one graph, and the whole round in one graph.

    python benchmarks/step/rounds.py

Weights are random. Where the accepted length is not forced, next to nothing of a random draft
is accepted: the time of a round says more than the tokens a second.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.draft.worker import DraftWorker
from specengine.engine.loop import Engine
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.runner.loader.source import resolve_model

NEW_TOKENS = 128
CHAIN: dict[str, Any] = {"algorithm": "EAGLE3", "num_steps": 3}
TREE: dict[str, Any] = {"algorithm": "EAGLE3", "num_steps": 4, "eagle_topk": 4} | {
    "num_draft_tokens": 16
}
TEXT: dict[str, Any] = {"algorithm": "NGRAM", "num_draft_tokens": 8, "ngram_branches": 3}
PENALTY: dict[str, Any] = {"presence_penalty": 0.5}
WARM: dict[str, Any] = {"temperature": 0.8}
SAMPLED: dict[str, Any] = CHAIN | {"draft_sampling": True}
RELAXED: dict[str, Any] = {"verify": "relaxed"}
SUFFIXES: dict[str, Any] = {"hybrid_suffix": True, "num_draft_tokens": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EAGLE3 chain of 3, presence penalty": (CHAIN, PENALTY),
    "EAGLE3 tree of 16, 3.0 tokens forced": (TREE | {"simulate_accept_length": 3.0}, {}),
    "EAGLE3 tree of 32, 3.0 tokens forced": (
        TREE | {"num_draft_tokens": 32, "simulate_accept_length": 3.0},
        {},
    ),
    "EAGLE3 tree of 16, presence penalty": (TREE, PENALTY),
    "STANDALONE chain of 3": ({"algorithm": "STANDALONE", "num_steps": 3}, {}),
    "NGRAM tree of 8": (TEXT | {"ngram_min_match": 1}, {}),
    **{
        f"EAGLE3 chain of 3, {rule}, temperature 0.8": (SAMPLED | {"verify": rule}, WARM)
        for rule in ("rejection", "block", "target_only")
    },
    "EAGLE3 chain of 3, rejection, presence penalty, temperature 0.8": (
        SAMPLED | {"verify": "rejection"},
        WARM | PENALTY,
    ),
    "EAGLE3 tree of 16, target_only, temperature 0.8": (TREE | {"verify": "target_only"}, WARM),
    "EAGLE3 tree of 16 samples, sibling, temperature 0.8": (
        TREE | {"draft_sampling": True, "verify": "sibling"},
        WARM,
    ),
    "EAGLE3 tree of 16 samples, sibling, presence penalty, temperature 0.8": (
        TREE | {"draft_sampling": True, "verify": "sibling"},
        WARM | PENALTY,
    ),
    "EAGLE3 chain of 3, relaxed": (CHAIN | RELAXED, {}),
    "EAGLE3 chain of 3, relaxed, temperature 0.8": (CHAIN | RELAXED, WARM),
    "EAGLE3 chain of 3 samples, relaxed, temperature 0.8": (SAMPLED | RELAXED, WARM),
    "EAGLE3 tree of 16, relaxed, temperature 0.8": (TREE | RELAXED, WARM),
    "STANDALONE tree of 16": (TREE | {"algorithm": "STANDALONE"}, {}),
    "NGRAM tree of 8, target_only, temperature 0.8": (
        TEXT | {"ngram_min_match": 1, "verify": "target_only"},
        WARM,
    ),
    "NGRAM chain of 8, target_only, temperature 0.8": (
        TEXT | {"ngram_min_match": 1, "ngram_branches": 1, "verify": "target_only"},
        WARM,
    ),
    # The first two overlap: in the second the host sees that no match can be long enough.
    "EAGLE3 chain of 3": (CHAIN, {}),
    "EAGLE3 chain of 3 with suffix matches, no match": (
        CHAIN | SUFFIXES | {"suffix_max_depth": 512, "hybrid_suffix_min_match": 511},
        {},
    ),
    "EAGLE3 chain of 3 with suffix matches of 7": (CHAIN | SUFFIXES, {}),
    "EAGLE3 chain of 3 with suffix matches of 3": (CHAIN | SUFFIXES | {"num_draft_tokens": 4}, {}),
    "EAGLE3 chain of 3 with suffix matches of 7, temperature 0.8": (CHAIN | SUFFIXES, WARM),
    "EAGLE3 chain of 3 samples with suffix matches of 7, rejection, temperature 0.8": (
        SAMPLED | SUFFIXES | {"verify": "rejection"},
        WARM,
    ),
    "EAGLE3 chain of 3 samples with suffix matches of 7, relaxed, temperature 0.8": (
        SAMPLED | SUFFIXES | RELAXED,
        WARM,
    ),
    "EAGLE3 tree of 16 samples with suffix matches of 15, sibling, temperature 0.8": (
        TREE | {"hybrid_suffix": True, "draft_sampling": True, "verify": "sibling"},
        WARM,
    ),
    "EAGLE3 tree of 16 with suffix matches of 15": (TREE | {"hybrid_suffix": True}, {}),
    "STANDALONE chain of 3 with suffix matches of 7": (
        {"algorithm": "STANDALONE", "num_steps": 3} | SUFFIXES,
        {},
    ),
}
MODES = ("eager", "a graph a forward", "drafts in one graph")
ROUND_GRAPH = "the round in one graph"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-shape")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--skip", nargs="+", choices=MODES, default=[], help="forwards left out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target = resolve_model(ModelConfig(model=args.model, load_format="dummy"))
        write_random_eagle3(Path(folder), target.hf_config, 16384)
        drafts = {"EAGLE3": folder, "STANDALONE": args.model, "NGRAM": None}
        for name in args.rounds:
            shape, params = CASES[name]
            path = drafts[shape["algorithm"]]
            spec = SpecConfig(adaptive=False, draft_model_path=path, **shape)
            for row in measure(args, spec, params):
                rows.append({"round": name, **row})
                print(rows[-1], flush=True)
    notes = f"""{args.model}, random weights, {NEW_TOKENS} new tokens, greedy where nothing else is
said, best of 2 runs."""
    print(report.write("rounds", "rounds", "Milliseconds of a round", by_round(rows), notes))


def by_round(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for a kind of round and batch size, a column for each way that its forwards ran;
    tokens a second and a round are of the last one."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        name, size = row["round"], row["batch"]
        of = {f"{mode}, ms": None for mode in (*MODES, ROUND_GRAPH)}
        one = found.setdefault((name, size), {"round": name, "batch": size, **of})
        one[f"{row['forwards']}, ms"] = row["ms"]
        one |= {"tok/s": row["tok/s"], "tokens a round": row["tau"]}
    return list(found.values())


def measure(
    args: argparse.Namespace, spec: SpecConfig, params: dict[str, Any]
) -> list[dict[str, Any]]:
    llm = LLM(
        args.model,
        spec,
        load_format="dummy",
        max_total_tokens=131072,
        cuda_graph_bs=tuple(args.batch_sizes),
    )
    given = {"temperature": 0.0, **params}
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **given)
    rows = []
    for mode in modes(llm.engine):
        if mode in args.skip:
            continue
        for size in args.batch_sizes:
            once(llm, size, sampling)
            best = min((once(llm, size, sampling) for _ in range(2)), key=lambda row: row["ms"])
            rows.append({"forwards": mode, "batch": size, **best})
    return rows


def modes(engine: Engine) -> Iterator[str]:
    """Each in turn, and the engine runs so."""
    pipeline, engine.pipeline = engine.pipeline, None
    drafter = getattr(engine.drafter, "inner", engine.drafter)
    runners = [engine.parts.worker.runner]
    loops = None
    if isinstance(drafter, DraftWorker):
        runners += drafter.runners
        loops = drafter.loops
    graphs = [runner.ragged_graphs for runner in runners]

    def switch(mode: str) -> str:
        for runner, graph in zip(runners, graphs, strict=True):
            runner.ragged_graphs = None if mode == MODES[0] else graph
        if isinstance(drafter, DraftWorker):
            drafter.loops = loops if mode == MODES[2] else None
        engine.pipeline = pipeline if mode == ROUND_GRAPH else None
        return mode

    found = MODES if loops is not None else MODES[:2]
    return map(switch, (*found, ROUND_GRAPH) if pipeline is not None else found)


def once(llm: LLM, size: int, params: SamplingParams) -> dict[str, Any]:
    """A batch of prompts that repeat themselves."""
    dice = random.Random(0)
    prompts = [[dice.randrange(2000) for _ in range(10)] * 3 for _ in range(size)]
    torch.cuda.synchronize()
    start = perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    torch.cuda.synchronize()
    seconds = perf_counter() - start
    tokens = sum(len(one.token_ids) for one in outputs)
    rounds = max(sum(one.spec.histogram) for one in outputs)
    return {"tok/s": tokens / seconds, "ms": 1000 * seconds / rounds, "tau": tokens / size / rounds}


if __name__ == "__main__":
    main()
