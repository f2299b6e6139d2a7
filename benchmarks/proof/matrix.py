"""Files what `specengine verify --record` has proved.

specengine verify --record 1.jsonl --part 1/2    # and, beside it, 2.jsonl --part 2/2
python benchmarks/proof/matrix.py 1.jsonl 2.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.cli.verify_view import Matrix, is_of_matrix
from specengine.engine.proof.check import Check
from specengine.engine.proof.suite import ALL_STATES, together


def read(path: Path) -> tuple[dict[str, Any], list[Check]]:
    """What the record begins with, and its checks."""
    first, *sections = (json.loads(line) for line in path.read_text().splitlines())
    return first, [Check(**check) for section in sections for check in section["checks"]]


def grid(matrix: Matrix, columns: list[str]) -> list[dict[str, Any]]:
    return [
        {"drafts, verifier": row} | {column: matrix.cell(row, column) for column in columns}
        for row in matrix.cells
    ]


def listed(checks: list[Check]) -> list[dict[str, Any]]:
    return [
        {
            "check": check.check,
            "subject": check.subject,
            "measured": f"{check.statistic:.3g}",
            "wanted": f"{check.sense} {check.threshold:g}",
            "holds": "yes" if check.passed else "NO",
            "note": check.note,
        }
        for check in checks
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    read_all = [read(path) for path in args.records]
    facts = read_all[0][0]["environment"]
    commits = {first["environment"]["commit"] for first, _ in read_all}
    plans = {first["about"]["plan"] for first, _ in read_all}
    checks = [check for _, found in read_all for check in found]
    checks += together(checks)
    matrix = Matrix.of([check for check in checks if is_of_matrix(check)])
    states = [str(state) for state in ALL_STATES]
    settings = [column for column in matrix.columns if column not in states]
    others = [check for check in checks if not is_of_matrix(check) or not check.passed]
    failed = sum(not check.passed for check in checks)
    missing = sum(not matrix.cell(row, one) for row in matrix.cells for one in states)
    notes = [
        f"{len(checks) - failed} of {len(checks)} checks hold; {missing} of "
        f"{len(matrix.cells) * len(states)} cells were not run. The {' and '.join(plans)} plan, in "
        f"{len(read_all)} parts, of which the line above names the first; all at commit "
        f"{' and '.join(sorted(commits))}. Filed by `benchmarks/proof/matrix.py`.",
        "",
        "Cells: p-value of the joint histograms. Each has also seen greedy text unchanged, drafts "
        "accepted, and enough requests in the state that it names, or it says FAILS.",
        "",
        "Sampling parameters, one by one, of fresh requests:",
        "",
        *report.table(grid(matrix, settings)),
        "",
        "Rules, mutants, and all histograms of a verifier taken together:",
        "",
        *report.table(listed(others)),
    ]
    rows = grid(matrix, states)
    print(report.write("proof-matrix", "specengine verify", rows, "\n".join(notes), facts))
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
