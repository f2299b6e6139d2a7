"""Where a throughput report is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specengine.lab.accept.markdown import table
from specengine.lab.accept.plots import check_matplotlib
from specengine.lab.environment import environment_line
from specengine.lab.files import write_text
from specengine.lab.throughput.plot import draw
from specengine.lab.throughput.report import Report
from specengine.lab.throughput.sheets import sheets


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

    def write(self, report: Report) -> list[Path]:
        """The numbers so far. Raises ConfigError where they cannot be written."""
        dated = [] if self.directory is None else [self._path(report, ".json")]
        paths = ([] if self.json is None else [self.json]) + dated
        for path in paths:
            write_text(path, report.to_json())
        return paths

    def finish(self, report: Report) -> list[Path]:
        """The files written."""
        written = self.write(report)
        if self.directory is None:
            return written
        page, plot = self._path(report, ".md"), self._path(report, ".png")
        draw(report, plot)
        write_text(page, markdown(report, plot.name))
        return [*written, page, plot]

    def _path(self, report: Report, suffix: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{report.date}-{self.name}{suffix}"


def markdown(report: Report, plot: str) -> str:
    """plot: its file's name."""
    lines = [
        f"# {report.title}",
        "",
        f"{report.date}, {environment_line(report.environment)}.",
        "",
        f"    {report.environment['command']}",
    ]
    for sheet in sheets(report):
        lines += ["", f"## {sheet.title}", "", *table(sheet), "", sheet.note]
    lines += ["", "## Settings", ""]
    for setting in report.settings:
        options = " ".join(f"{name}={value}" for name, value in setting.options.items())
        lines.append(f"- **{setting.name}**: `{options or 'plain decoding'}`")
    return "\n".join([*lines, "", f"![{report.title}]({plot})"]) + "\n"
