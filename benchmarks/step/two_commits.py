"""Rounds of two commits in turns: a process of each stays, and runs a batch whenever it is told to.
So a machine that is now fast and now slow is the same to both. Rewrites a table of
results/rebuild-baseline.md.

    git worktree add /tmp/old dcb17d5
    python benchmarks/step/two_commits.py /tmp/old --models tiny smollm2 --device cpu
    python benchmarks/step/two_commits.py /tmp/old --models smollm2-shape llama-3.1-8b-shape
    python benchmarks/step/two_commits.py /tmp/old --models smollm2-shape --settings chosen tree
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from tree_process import TreeProcess

HERE = Path(__file__).parent
_LEAST = 6  # pairs of runs
EAGLE3 = "--speculative-algorithm EAGLE3 --speculative-num-steps 3"
FIXED = "--no-speculative-adaptive"
TREE = f"{FIXED} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
BLOCK = f"{FIXED} --speculative-draft-sampling --speculative-verify block"
NGRAM = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 {FIXED}"
PLAIN = "no speculation"


@dataclass(frozen=True)
class Setting:
    """One pair of processes. runs: what is measured in it: name, engine, temperature."""

    name: str
    flags: str
    runs: tuple[tuple[str, str, float], ...]
    forced: bool = True  # on a GPU the accepted length is forced, of drafts of random weights
    per: str = "rounds"  # on a CPU; "tokens" where the two commits may choose other depths


SETTINGS = (
    Setting(
        "fixed",
        f"{EAGLE3} {FIXED} --compare-plain",
        (
            ("no speculation", PLAIN, 0.0),
            ("no speculation, temperature 0.8", PLAIN, 0.8),
            ("EAGLE-3, chain, K = 3 fixed", "EAGLE3", 0.0),
            ("EAGLE-3, K = 3 fixed, temperature 0.8", "EAGLE3", 0.8),
        ),
    ),
    Setting(
        "chosen",
        f"{EAGLE3} --speculative-adaptive",
        (("EAGLE-3, chain, K chosen", "EAGLE3", 0.0),),
        per="tokens",
    ),
    Setting("tree", f"{EAGLE3} {TREE}", (("EAGLE-3, tree of 16", "EAGLE3", 0.0),)),
    Setting("ngram", NGRAM, (("NGRAM, 8 tokens", "NGRAM", 0.0),), forced=False),
    Setting(
        "sampled",
        f"{EAGLE3} {BLOCK}",
        (("EAGLE-3, sampled drafts, block, temperature 0.8", "EAGLE3", 0.8),),
        forced=False,
    ),
)
NAMES = [one.name for one in SETTINGS]


class Side(TreeProcess):
    """The process of one commit."""

    def __init__(self, tree: Path, args: list[str], log: Path) -> None:
        command = [sys.executable, str(HERE / "one_commit.py"), "bench", "throughput", *args]
        super().__init__(tree, command, log)
        self.startup = self.read()["startup"]


def main() -> None:
    args = parse_args()
    title = "Microseconds of a round on a CPU" if args.on_cpu else "Output tokens a second"
    name = "rebuild-cpu" if args.on_cpu else "rebuild-in-turns"
    rows: list[dict[str, Any]] = []
    for row in rows_of(args):  # a run that is cut keeps what it has
        rows.append(row)
        report.write("rebuild-baseline", name, f"{title}, old beside new, in turns", rows, NOTES)


NOTES = """
A process of either commit stays, and they run one batch each right after the other, now this one
first, now that one. The ratio is the median of the pairs' ratios: of CPU time a round on a CPU, or
a token where K is chosen (below 1 the new commit is faster), of tokens a second on a GPU (above 1
it is). Rounds a second, new / old: what is left of that where the two commits' texts differ, and
with them how many of a lookup's drafts are accepted. Waits a second: of the host for the device,
with NGRAM one a round of the whole batch.
"""


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in args.models:
        for setting in chosen(args):
            trees = (args.old, HERE.parents[1])
            logs = [args.logs / f"{model}.{setting.name}.{side}.log" for side in ("old", "new")]
            flags = flags_of(args, model, setting)
            sides = [Side(tree, flags, log) for tree, log in zip(trees, logs, strict=True)]
            for label, engine, temperature in setting.runs:
                for size in args.batch_sizes:
                    pairs = measure(sides, engine, size, temperature, args.seconds)
                    found = figures(pairs, args, setting.per)
                    row = {"model": model, "run": label, "batch": size, **found}
                    print(row, flush=True)
                    yield row
            for side in sides:
                side.close()


def chosen(args: argparse.Namespace) -> list[Setting]:
    return [one for one in SETTINGS if one.name in args.settings]


def flags_of(args: argparse.Namespace, model: str, setting: Setting) -> list[str]:
    given = [model, "--new-tokens", str(args.new_tokens), *setting.flags.split()]
    given += ["--batch-sizes", *map(str, args.batch_sizes)]
    if args.on_cpu:
        return [*given, "--device", "cpu", "--max-running-requests", str(max(args.batch_sizes))]
    if "EAGLE3" in setting.flags:
        given += ["--random-draft", "16384"]
    if setting.forced:
        given += ["--speculative-simulate-accept-length", "2.5"]
    return [*given, "--load-format", "dummy", "--max-total-tokens", "40960"]


def measure(
    sides: list[Side], engine: str, size: int, temperature: float, seconds: float
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of old and new, for so long; a run of each warms up."""
    for side in sides:
        side.run(engine=engine, batch=size, temperature=temperature)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    end = monotonic() + seconds
    while len(pairs) < _LEAST or monotonic() < end:
        order = (0, 1) if len(pairs) % 2 else (1, 0)
        asked = {"engine": engine, "batch": size, "temperature": temperature}
        found = {place: sides[place].run(**asked) for place in order}
        pairs.append((found[0], found[1]))
    return pairs


def figures(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], args: argparse.Namespace, per: str
) -> dict[str, Any]:
    def of(run: dict[str, Any]) -> float:
        if args.on_cpu:
            return float(1e6 * run["cpu"] / run[per])
        return float(run["tokens"] / run["seconds"])

    ratios = [of(new) / of(old) for old, new in pairs]
    low, _, high = quantiles(ratios, n=4)
    found = {
        "pairs": len(pairs),
        "old": median(of(old) for old, _ in pairs),
        "new": median(of(new) for _, new in pairs),
        "new / old": round(median(ratios), 3),
        "quartiles": f"{low:.3f} to {high:.3f}",
    }
    if args.on_cpu:
        return found
    return {
        **found,
        "rounds a second": _of_both(pairs, "rounds"),
        "waits a second": _of_both(pairs, "waits"),
    }


def _of_both(pairs: list[tuple[dict[str, Any], dict[str, Any]]], what: str) -> float | None:
    """New / old, of what is counted in a second; None where the old commit counted none."""
    counted = [(old, new) for old, new in pairs if old[what]]
    ratios = [new[what] / new["seconds"] / (old[what] / old["seconds"]) for old, new in counted]
    return round(median(ratios), 3) if ratios else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that two_starts.py and two_rounds.py take, too."""
    parser.add_argument("old", type=Path, help="a tree of the old commit; the new one is this one")
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--settings", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder of the logs")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=4, help="of each row")
    args = parser.parse_args()
    args.old, args.on_cpu = args.old.resolve(), args.device == "cpu"
    return args


if __name__ == "__main__":
    main()
