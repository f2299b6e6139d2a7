"""Files what `specengine verify --record` has proved.

specengine verify --record 1.jsonl --part 1/2    # and, beside it, 2.jsonl --part 2/2
python benchmarks/proof/matrix.py 1.jsonl 2.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.cli.verify_view import Matrix, is_of_matrix
from specengine.engine.proof.check import Check
from specengine.engine.proof.suite import FULL, QUICK, together
from specengine.lab.environment import environment_line


@dataclass
class Proof:
    """Sections by name; of one that several records have, the last says it."""

    begins: list[dict[str, Any]] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)
    sections: dict[str, list[Check]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        begin, *sections = (json.loads(line) for line in path.read_text().splitlines())
        self.begins.append(begin)
        part, parts = map(int, begin["about"]["part"].split("/"))
        for number, section in enumerate(sections):
            name = section["section"]
            self.places[name] = number * parts + part
            self.commits[name] = begin["environment"]["commit"]
            self.sections[name] = [Check(**check) for check in section["checks"]]

    def checks(self) -> list[Check]:
        """In the order of the plan."""
        names = sorted(self.sections, key=lambda name: self.places[name])
        return [check for name in names for check in self.sections[name]]

    @property
    def plans(self) -> set[str]:
        return {begin["about"]["plan"] for begin in self.begins}

    def origin(self) -> str:
        """What ran where."""
        counts = Counter(self.commits.values())
        by_commit = ", ".join(f"{counts[commit]} at commit {commit}" for commit in counts)
        machines = sorted({environment_line(begin["environment"]) for begin in self.begins})
        models = {Path(one["about"]["model"] or "a tiny random Llama").name for one in self.begins}
        about = f"The {' and '.join(self.plans)} plan of `specengine verify`"
        about += f" on {', '.join(sorted(models))}, "
        about += f"{len(self.commits)} sections: {by_commit}. Filed by `benchmarks/proof/matrix.py`"
        about += f" from {len(self.begins)} records made on: "
        return about + "; ".join(machines) + "."


CELLS = "cells: drafter, rule, engine state and sampling parameters"


def counted(checks: list[Check]) -> list[dict[str, Any]]:
    """How many checks of each kind there are, and how many hold."""
    names = [CELLS if is_of_matrix(check) else check.check for check in checks]
    held = Counter(name for name, check in zip(names, checks, strict=True) if check.passed)
    of_each = Counter(names).items()
    return [{"check": name, "checks": count, "hold": held[name]} for name, count in of_each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--name", default="proof-matrix", help="of the table")
    args = parser.parse_args()
    proof = Proof()
    for path in args.records:
        proof.read(path)
    checks = proof.checks()
    checks += together(checks)
    matrix = Matrix.of([check for check in checks if is_of_matrix(check)])
    states = [str(state) for state in (FULL if proof.plans == {FULL.name} else QUICK).states]
    failed = [f"{check.check}, {check.subject}" for check in checks if not check.passed]
    missing = sum(not matrix.cell(row, one) for row in matrix.cells for one in states)
    notes = [
        f"{len(checks) - len(failed)} of {len(checks)} checks hold; {missing} of "
        f"{len(matrix.cells) * len(states)} cells were not run. {proof.origin()}",
        *(f"Fails: {one}." for one in failed),
    ]
    facts = proof.begins[0]["environment"]
    print(
        report.write(
            "proof", args.name, "What was proved", counted(checks), "\n\n".join(notes), facts
        )
    )
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
