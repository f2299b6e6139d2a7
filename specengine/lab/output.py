"""Where the report of a bench is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specengine.lab.accept.markdown import table
from specengine.lab.accept.plots import check_matplotlib
from specengine.lab.accept.sheet import Sheet
from specengine.lab.environment import environment_line
from specengine.lab.files import write_text


class Writable(Protocol):
    @property
    def date(self) -> str: ...

    @property
    def environment(self) -> dict[str, Any]: ...

    @property
    def title(self) -> str: ...

    def to_json(self) -> str: ...


@dataclass(frozen=True)
class Output:
    """json: one file of all numbers. directory: DATE-NAME.json, .md and .png."""

    json: Path | None
    directory: Path | None
    name: str

    def check(self) -> None:
        """Before anything is measured: raises ConfigError where a plot could not be drawn."""
        if self.directory is not None:
            check_matplotlib()

    def write(self, report: Writable) -> list[Path]:
        """The numbers so far. Raises ConfigError where they cannot be written."""
        dated = [] if self.directory is None else [self._path(report, ".json")]
        paths = ([] if self.json is None else [self.json]) + dated
        for path in paths:
            write_text(path, report.to_json())
        return paths

    def finish(
        self,
        report: Writable,
        sheets: Iterable[Sheet],
        draw: Callable[[Path], None],
        last_lines: Sequence[str] = (),
    ) -> list[Path]:
        """The files written. draw: makes the plot, a PNG."""
        written = self.write(report)
        if self.directory is None:
            return written
        page, plot = self._path(report, ".md"), self._path(report, ".png")
        draw(plot)
        lines = [*_lines(report, sheets), *last_lines, "", f"![{report.title}]({plot.name})"]
        write_text(page, "\n".join(lines) + "\n")
        return [*written, page, plot]

    def _path(self, report: Writable, suffix: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{report.date}-{self.name}{suffix}"


def _lines(report: Writable, sheets: Iterable[Sheet]) -> list[str]:
    lines = [
        f"# {report.title}",
        "",
        f"{report.date}, {environment_line(report.environment)}.",
        "",
        f"    {report.environment['command']}",
    ]
    for sheet in sheets:
        lines += ["", f"## {sheet.title}", "", *table(sheet)]
        lines += ["", sheet.note] if sheet.note else []
    return lines
