"""How an acceptance bench looks in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specengine.lab.accept.report import Report
from specengine.lab.accept.sheet import Sheet
from specengine.lab.accept.sheets import sheets
from specengine.lab.environment import environment_line

_WIDE = 200  # columns, where nobody looks on


class Display:
    """A bar on stderr: answers done of all, their rate, the time left. Results go to `keep`."""

    def __init__(self, keep: Callable[[Report], None]) -> None:
        self._keep = keep
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("loading", total=None, rate="")
        self._start, self._made = monotonic(), 0

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def starts(self, name: str, num_answers: int) -> None:
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=num_answers, rate="")
        self._start, self._made = monotonic(), 0

    def answered(self, num_tokens: int) -> None:
        self._made += num_tokens
        rate = f"{self._made / (monotonic() - self._start):.0f} tok/s"
        self._bar.update(self._task, advance=1, rate=rate)

    def has_come(self, report: Report) -> None:
        self._keep(report)


def show(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(f"[bold]{report.title}[/]")
    console.print(environment_line(report.environment), highlight=False)
    for sheet in sheets(report):
        console.print()
        console.print(_table(sheet))


def _table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, caption=sheet.note or None, caption_justify="left")
    table.title_justify = "left"
    for column in sheet.columns:
        table.add_column(column)
    for row in sheet.rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    return table
