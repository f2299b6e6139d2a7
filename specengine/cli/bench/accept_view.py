"""How an acceptance bench looks in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specengine.cli.bench.tables import show_sheets
from specengine.lab.accept.report import Report
from specengine.lab.accept.sheets import sheets
from specengine.lab.environment import environment_line


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
    show_sheets(report.title, environment_line(report.environment), sheets(report))
