"""Records the golden traces, or holds today's code against them:

    python -m tests.golden.record           # remakes traces.json.gz; minutes
    python -m tests.golden.record --check   # every case; exit status 1 where one differs
    python -m tests.golden.record --check --backwards  # requests and kinds in the opposite order

A golden trace says what a batch of requests got: tokens, drafts and accepted drafts of each round,
finish reasons and logprobs, on the host's rounds and on whole device rounds (run on a CPU without
graphs). Remake them only where a change of outputs is meant, and say so in the commit.

Requests are recorded that say the same with weights a little off: others, which hang on a near tie,
would say something else on another processor. Their seeds are passed over.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specengine.engine.round.build import HostRoundsError
from tests.golden.cases import FEATURES, KINDS, Kind
from tests.golden.models import Models
from tests.golden.play import PLACES, differences, engine_of, fingerprint, load, play, save

NOISE = 2e-6  # of weights: some 1e-5 of a logit
SEEDS = range(1, 9)


def record(kind: Kind, folder: Path) -> dict[str, Any]:
    exact, off = Models(folder), Models(folder / "off", NOISE)
    found: dict[str, Any] = {"host": {}}
    with engine_of(kind, "host", exact) as llm, engine_of(kind, "host", off) as other:
        for feature in FEATURES:
            for seed in SEEDS:
                one = play(llm, "host", feature, seed)
                if not differences(one, play(other, "host", feature, seed), False):
                    break
            else:
                raise RuntimeError(f"{kind.name}, {feature}: near ties with every seed")
            found["host"][feature] = one
    try:
        with engine_of(kind, "device", exact) as llm:
            pairs = [(name, one["seed"]) for name, one in found["host"].items()]
            found["device"] = {name: play(llm, "device", name, seed) for name, seed in pairs}
    except HostRoundsError as refused:
        found["refused"] = str(refused)
    return found


def check(kind: Kind, folder: Path, recorded: dict[str, Any], backwards: bool) -> list[str]:
    """Differences. backwards: all but the last bits of logprobs."""
    exact, is_same = Models(folder), recorded["fingerprint"] == fingerprint() and not backwards
    found: list[str] = []
    for place, features in recorded["kinds"][kind.name].items():
        if place in PLACES:
            with engine_of(kind, place, exact) as llm:
                for name, one in features.items():
                    again = play(llm, place, name, one["seed"], backwards)
                    found += differences(one, again, is_same, f"{kind.name}/{place}/{name}")
    return found


def _start() -> None:
    torch.set_num_threads(1)


def _one(given: tuple[str, dict[str, Any] | None, bool]) -> Any:
    name, recorded, backwards = given
    with TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "off").mkdir()
        if recorded is None:
            return name, record(KINDS[name], at), fingerprint()
        return name, check(KINDS[name], at, recorded, backwards), None


def run(jobs: int, recorded: dict[str, Any] | None, backwards: bool) -> Iterator[Any]:
    names = [*KINDS][::-1] if backwards else [*KINDS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start) as pool:
        yield from pool.map(_one, [(name, recorded, backwards) for name in names])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--backwards", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    recorded = load() if given.check else None
    kinds, status = dict[str, Any](), 0
    facts: dict[str, Any] | None = None
    for name, found, of_worker in run(given.jobs, recorded, given.backwards):
        print(name, *(found if given.check else ()), sep="\n  ", flush=True)
        kinds[name], facts = found, of_worker
        status |= bool(given.check and found)
    if not given.check:
        save({"fingerprint": facts, "kinds": kinds})
    return status


if __name__ == "__main__":
    sys.exit(main())
