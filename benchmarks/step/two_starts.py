"""Seconds until the engines of two commits are ready, in turns: one process after the other, now
this commit first, now that one. Rewrites a table of results/rebuild-baseline.md.

    git worktree add /tmp/old dcb17d5
    python benchmarks/step/two_starts.py /tmp/old --models smollm2-shape llama-3.1-8b-shape

The first pair compiles what no cache has and finds files that memory does not hold; it is told and
not counted. Settings are those of two_commits.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from two_commits import HERE, Setting, Side, add_arguments, chosen, flags_of

TREES = {"new": HERE.parents[1]}
NOTES = """
Medians of processes one after the other, without the first pair, whose seconds stand beside it. Of
two engines in a process (the fixed depth runs beside plain decoding) the first one's start counts.
"""


def start(args: argparse.Namespace, model: str, setting: Setting, side: str) -> dict[str, float]:
    """engine: seconds that it took to build; process: from the process's start."""
    log = args.logs / f"{model}.{setting.name}.start.{side}.log"
    running = Side(args.trees[side], flags_of(args, model, setting), log)
    running.close()
    return {"engine": running.startup[0]["total"], "process": running.startup[0]["process"]}


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in args.models:
        for setting in chosen(args):
            pairs = []
            for number in range(args.pairs + 1):
                order = ("old", "new") if number % 2 else ("new", "old")
                pairs.append({side: start(args, model, setting, side) for side in order})
                print(model, setting.name, pairs[-1], flush=True)
            yield row_of(model, setting.name, pairs)


def row_of(model: str, name: str, pairs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    first, *others = pairs
    row: dict[str, Any] = {"model": model, "setting": name, "pairs": len(others)}
    for what in ("engine", "process"):
        for side in ("old", "new"):
            row[f"{what}, s, {side}"] = median(one[side][what] for one in others)
        ratios = [one["new"][what] / one["old"][what] for one in others]
        row[f"{what}, new / old"] = round(median(ratios), 3)
    return row | {f"first process, s, {side}": first[side]["process"] for side in ("old", "new")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=3, help="that count")
    args = parser.parse_args()
    args.on_cpu = args.device == "cpu"
    args.trees = {**TREES, "old": args.old.resolve()}
    rows: list[dict[str, Any]] = []
    for row in rows_of(args):
        rows.append(row)
        title = "Seconds until an engine is ready, old beside new, in turns"
        report.write("rebuild-baseline", "rebuild-start-up", title, rows, NOTES)


if __name__ == "__main__":
    main()
