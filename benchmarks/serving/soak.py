"""Thousands of requests of every sort in too little memory, a fifth of them aborted at random: what
is lost, what is miscounted, and what is not as it is without speculation.

    python benchmarks/serving/soak.py --requests 2000
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.config import EngineConfig, ModelConfig
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.soak import Soak, soak
from specengine.engine.proof.subjects import CROWDED, FRESH, PLAIN, State, Subject
from specengine.engine.proof.tiny_model import save_tiny_models
from specengine.engine.proof.workload import Workload
from specengine.runner.loader.loaded_model import LoadedModel

SUBJECTS = ("NGRAM tree", "STANDALONE tree", "EAGLE3 chain", "MTP, a layer a step: chain + suffix")
ABORTED = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        models = save_tiny_models(Path(folder))
        config = EngineConfig(model=ModelConfig(model=str(models.target), dtype="float32"))
        loaded = load(config, Phases())
        named = {one.name: one for one in [*without_models(), *with_models(models)]}

        def run(subject: Subject, state: State) -> tuple[Soak, float]:
            engine = subject.build(config, state, loaded, [])
            start = perf_counter()
            done = soak(engine, workload(loaded, args.seed), args.requests, state)
            return done, perf_counter() - start

        plain, _ = run(PLAIN, State(FRESH))
        rows = []
        for name in args.subjects:
            for page_size in (1, 16):
                done, seconds = run(named[name], State(CROWDED, page_size))
                rows.append(row(name, page_size, done, plain, seconds))
                print(rows[-1], flush=True)
    print(report.write("proof", "soak", "Mixed requests, a fifth aborted", rows, NOTES))
    return 0 if all(one["holds"] == "yes" for one in rows) else 1


def workload(loaded: LoadedModel, seed: int) -> Workload:
    return Workload(loaded.tokenizer, ABORTED, seed)


def row(name: str, page_size: int, done: Soak, plain: Soak, seconds: float) -> dict[str, Any]:
    checks = list(done.checks(name, plain))
    same = done.outputs.keys() & plain.outputs.keys()
    return {
        "drafts": name,
        "page size": page_size,
        "outputs": len(done.outputs),
        "aborted": done.num_aborted,
        "retractions": done.num_retractions,
        "cached tokens": done.num_cached_tokens,
        "accepted": done.num_accepted,
        "lost slots": done.lost_slots,
        "lost rows": done.lost_rows,
        "kept by the drafter": done.remembered,
        "miscounted": len(done.miscounted),
        "changed": sum(done.outputs[one] != plain.outputs[one] for one in same),
        "s": seconds,
        "holds": "yes" if all(check.passed for check in checks) else "NO",
    }


NOTES = f"""\
Greedy and sampled requests, penalties, stop strings, n > 1, logprobs, grammars, limits on drafts;
short and long prompts, half with a shared prefix; 24 requests at a time in 400 KV slots (those of
target and draft are the same), prompts in chunks of 64; {ABORTED:.0%} of the requests are aborted
within their first 12 steps. lost: slots and rows of the page table that are not free in the end,
once the prefix cache is emptied. kept by the drafter: requests of which it still has state.
miscounted: outputs whose length is not 1 + rounds + accepted, or whose histogram does not add up to
accepted. changed: outputs that are not, token by token, those of the same requests without
speculation in ample memory; of drafts that are not sampled every token must be the same.
"""

if __name__ == "__main__":
    sys.exit(main())
