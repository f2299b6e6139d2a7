"""The test suite on a machine with GPUs: several workers a card, and what came of it as a table.

    python benchmarks/native_suite.py run tests --out OUT --workers 6
    python benchmarks/native_suite.py run tests/engine tests/runner --out OUT --marks gpu
    python benchmarks/native_suite.py table OUT/*.jsonl --table native-suite --notes "…"

`run`: each worker gets the next card of CUDA_VISIBLE_DEVICES, which it alone sees, before anything
imports PyTorch. --all-cards: each sees all of them, for tests of several ranks. A run that is cut
leaves the tests that have ended. `table`: rooms and what passed, failed and was skipped, of several
runs; of a test that ran twice the later file counts. It reads JUnit files, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import report

TREE = Path(__file__).resolve().parents[1]
OUTCOMES = ("passed", "failed", "skipped")
_WORST = ("passed", "skipped", "failed")  # of the phases of a test
TOP = "rules of the house and of layers"  # of files that lie in no room
Case = tuple[str, str]  # class and name


def main() -> int:
    args = parse_args()
    return run(args) if args.command == "run" else table(args)


def run(args: argparse.Namespace) -> int:
    """The status of pytest."""
    args.out.mkdir(parents=True, exist_ok=True)
    from specengine.lab.environment import environment

    (args.out / f"{args.name}.facts.json").write_text(json.dumps(environment()))
    command = command_of(args, cards_of(os.environ.get("CUDA_VISIBLE_DEVICES")))
    environment_of_tests = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=TREE, env=environment_of_tests, check=False).returncode


def cards_of(visible: str | None) -> list[str]:
    return [one for one in (visible or "").split(",") if one]


def command_of(args: argparse.Namespace, cards: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", *map(str, args.paths), "-q", "--durations=15"]
    command += ["--continue-on-collection-errors", f"--timeout={args.timeout}"]
    file = (args.out / args.name).absolute().with_suffix(".jsonl")
    command += ["-p", "benchmarks.jobs.outcomes", "--outcomes", str(file), "-m", args.marks]
    # Where pytest-benchmark is installed it warns of workers, and a warning is an error.
    command += ["-p", "no:benchmark"]
    for part in args.deselect:
        command += ["--deselect", str(part)]
    each = f"{args.workers}*popen"
    workers = [f"{each}//env:CUDA_VISIBLE_DEVICES={card}" for card in cards]
    if args.all_cards or not cards:
        workers = [each]
    if not args.workers:
        return command
    for one in workers:
        command += ["--tx", one]
    return [*command, "--dist", "worksteal"]


def table(args: argparse.Namespace) -> int:
    facts = json.loads(args.files[0].with_suffix(".facts.json").read_text())
    found = dict[Case, str]()
    for file in args.files:
        found |= outcomes_of(file)
    print(report.write("native-suite", args.table, args.title, rows_of(found), args.notes, facts))
    return 0


def outcomes_of(file: Path) -> dict[Case, str]:
    """Of each test of a file of `run`, or of a JUnit file."""
    found = dict[Case, str]()
    for case, outcome in (_of_junit if file.suffix == ".xml" else _of_lines)(file):
        found[case] = max(outcome, found.get(case, outcome), key=_WORST.index)
    return found


def _of_lines(file: Path) -> Iterator[tuple[Case, str]]:
    for line in file.read_text().splitlines():
        one = json.loads(line)
        name, bracket, parameters = one["id"].partition("[")
        path, *parts = name.split("::")
        parts = [path.removesuffix(".py").replace("/", "."), *parts]
        yield (".".join(parts[:-1]), parts[-1] + bracket + parameters), one["outcome"]


def _of_junit(file: Path) -> Iterator[tuple[Case, str]]:
    for one in ElementTree.parse(file).getroot().iter("testcase"):
        kinds = {child.tag for child in one}
        failed = kinds & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        yield (one.get("classname", ""), one.get("name", "")), outcome


def rows_of(found: dict[Case, str]) -> list[dict[str, Any]]:
    """By room, with all of them together below."""
    rooms: dict[str, Counter[str]] = {}
    for case, outcome in found.items():
        rooms.setdefault(room_of(".".join(filter(None, case))), Counter())[outcome] += 1
    order = sorted(rooms, key=lambda room: (room == TOP, room))
    rows = [_row(room, rooms[room]) for room in order]
    return [*rows, _row("together", sum(rooms.values(), Counter[str]()))]


def _row(room: str, counts: Counter[str]) -> dict[str, Any]:
    return {"room": room, **{one: counts[one] for one in OUTCOMES}}


def room_of(name: str) -> str:
    """tests.ROOM.test_file.test_name → ROOM; a file that cannot be collected has no test's name."""
    parts = name.partition("[")[0].split(".")
    return parts[1] if len(parts) > 2 and not parts[1].startswith("test_") else TOP


def existing(text: str) -> Path:
    path = Path(text.partition("::")[0])
    if not (TREE / path).exists():
        raise argparse.ArgumentTypeError(f"there is no {path}")
    return Path(text)


def parse_args(argv: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run tests")
    one.add_argument("paths", nargs="+", type=existing, help="of the tree: folders, files, tests")
    one.add_argument("--out", type=Path, required=True, metavar="DIR")
    one.add_argument("--name", default="junit", help="of the files in --out")
    one.add_argument("--workers", type=int, default=4, help="a card; 0 runs in one process")
    one.add_argument("--marks", default="not slow and not model", help="as pytest's -m")
    one.add_argument("--deselect", nargs="+", default=[], type=existing, help="paths to leave out")
    one.add_argument("--all-cards", action="store_true", help="each worker sees all of them")
    one.add_argument("--timeout", type=int, default=150, help="seconds of a test")
    two = commands.add_parser("table", help="write a table of benchmarks/results/native-suite.md")
    two.add_argument("files", nargs="+", type=Path, metavar="FILE")
    two.add_argument("--table", default="native-suite")
    two.add_argument("--title", default="The suite on GPUs")
    two.add_argument("--notes", default="", help="what a reader should know of it")
    return parser.parse_args(None if argv is None else [*argv])


if __name__ == "__main__":
    sys.exit(main())
