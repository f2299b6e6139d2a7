"""Microseconds on the device and kernels of a captured round, of two commits by turns. Rewrites a
table of results/rebuild-baseline.md.

    git worktree add /tmp/old dcb17d5
    python benchmarks/step/two_rounds.py /tmp/old --models smollm2-shape --batch-sizes 1 8 64

Runs `specengine bench step --nodes` of either tree. Settings are those of two_commits.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench_tables
import report
from two_commits import HERE, Setting, add_arguments, chosen, flags_of

NOTES = """
Kernels of a round's graph and the gaps between them, without the gap between rounds, which the host
decides under a profiler. The less of each commit's runs, which took turns.
"""


def step(
    args: argparse.Namespace, model: str, setting: Setting, tree: Path
) -> list[dict[str, Any]]:
    """Rows of one run, a row a batch size. Raises CalledProcessError."""
    flags = [one for one in flags_of(args, model, setting) if one != "--compare-plain"]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        command = [sys.executable, "-m", "specengine", "bench", "step", *flags, "--json", str(file)]
        command += [] if args.on_cpu else ["--nodes"]
        environment = os.environ | {"PYTHONPATH": path}
        with (args.logs / f"{model}.{setting.name}.step.log").open("a") as log:
            subprocess.run(
                command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True
            )
        return rounds_of(json.loads(file.read_text()))


def rounds_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a batch size, of what `bench step` writes: its seconds of a round hold the gap before
    the next one (`between`), and here that does not count. On a CPU it is null."""
    rows: list[dict[str, Any]] = bench_tables.step({"": found})
    for row, point in zip(rows, found["points"], strict=True):
        row["a round"] -= 1e6 * (point["between"] or 0.0)
    return rows


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trees = {"old": args.old.resolve(), "new": HERE.parents[1]}
    for model in args.models:
        for setting in chosen(args):
            found: dict[str, list[list[dict[str, Any]]]] = {"old": [], "new": []}
            for number in range(args.repeats):
                for side in ("old", "new") if number % 2 else ("new", "old"):
                    found[side].append(step(args, model, setting, trees[side]))
            for place, size in enumerate(args.batch_sizes):
                row: dict[str, Any] = {"model": model, "setting": setting.name, "batch": size}
                for what, title in (("a round", "us"), ("kernels", "kernels")):
                    for side, runs in found.items():
                        row[f"{title}, {side}"] = min(run[place][what] for run in runs)
                print(row, flush=True)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each commit")
    parser.set_defaults(new_tokens=128)
    args = parser.parse_args()
    args.on_cpu = args.device == "cpu"
    rows: list[dict[str, Any]] = []
    for row in rows_of(args):
        rows.append(row)
        title = "Microseconds and kernels of a captured round, old beside new, by turns"
        report.write("rebuild-baseline", "rebuild-step", title, rows, NOTES)


if __name__ == "__main__":
    main()
