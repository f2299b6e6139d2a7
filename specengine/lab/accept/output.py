"""Where a report is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specengine.lab.accept.markdown import markdown
from specengine.lab.accept.plots import check_matplotlib, draw_plots
from specengine.lab.accept.report import Report
from specengine.lab.files import write_text


@dataclass(frozen=True)
class Output:
    """json: one file of all numbers. directory: DATE-NAME.json, .md and plots."""

    json: Path | None
    directory: Path | None
    name: str

    def check(self) -> None:
        """Before hours are spent: raises ConfigError where plots could not be drawn."""
        if self.directory is not None:
            check_matplotlib()

    def write(self, report: Report) -> None:
        """What there is so far. Raises ConfigError where it cannot be written."""
        for path in self._json_paths(report):
            write_text(path, report.to_json())

    def finish(self, report: Report) -> list[Path]:
        """The files written."""
        self.write(report)
        written = self._json_paths(report)
        if self.directory is not None:
            stem = self._stem(report)
            plots = draw_plots(report, self.directory, stem)
            page = self.directory / f"{stem}.md"
            write_text(page, markdown(report, {title: path.name for title, path in plots.items()}))
            written += [page, *plots.values()]
        return written

    def _json_paths(self, report: Report) -> list[Path]:
        dated = [] if self.directory is None else [self.directory / f"{self._stem(report)}.json"]
        return ([] if self.json is None else [self.json]) + dated

    def _stem(self, report: Report) -> str:
        return f"{report.date}-{self.name}"
