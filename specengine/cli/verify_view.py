"""How proofs are shown: the matrix of what ran through the engine, then all else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from specengine.engine.proof.check import CHI_SQUARED, Check

_GOOD, _BAD = "[green]holds[/]", "[bold red]FAILS[/]"


@dataclass(frozen=True)
class Matrix:
    """Checks whose subject is "row; column", by row and column."""

    cells: dict[str, dict[str, list[Check]]]

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Matrix:
        cells: dict[str, dict[str, list[Check]]] = {}
        for check in checks:
            row, _, column = check.subject.partition("; ")
            cells.setdefault(row, {}).setdefault(column, []).append(check)
        return cls(cells)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.cells.values() for column in row))

    def cell(self, row: str, column: str) -> str:
        """The p-value where all holds, or what does not; empty where nothing was tried."""
        checks = self.cells[row].get(column, [])
        failed = [check.check for check in checks if not check.passed]
        if failed:
            return "FAILS: " + ", ".join(failed)
        return next(
            (f"{check.statistic:.2g}" for check in checks if check.check == CHI_SQUARED), ""
        )


def is_of_matrix(check: Check) -> bool:
    return "; " in check.subject and "catches" not in check.check


def show(checks: Sequence[Check]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    matrix = [check for check in checks if is_of_matrix(check)]
    if matrix:
        console.print(_grid(Matrix.of(matrix)))
    listed = [check for check in checks if not is_of_matrix(check) or not check.passed]
    if listed:
        console.print(_list(listed))
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks hold")


def _grid(matrix: Matrix) -> Table:
    caption = (
        "p-values of joint histograms; each cell has also seen greedy text unchanged, drafts "
        "accepted, and enough requests in the state that it names"
    )
    table = Table("drafts, verifier", *matrix.columns, caption=caption)
    for row in matrix.cells:
        texts = [matrix.cell(row, column) for column in matrix.columns]
        table.add_row(row, *(f"[bold red]{t}[/]" if "FAILS" in t else t for t in texts))
    return table


def _list(checks: Sequence[Check]) -> Table:
    caption = "enumeration: largest error of a joint probability; χ²: p-value"
    table = Table("check", "subject", "measured", "wanted", "", "note", caption=caption)
    for check in checks:
        table.add_row(
            check.check,
            check.subject,
            f"{check.statistic:.3g}",
            f"{check.sense} {check.threshold:g}",
            _GOOD if check.passed else _BAD,
            check.note,
        )
    return table
