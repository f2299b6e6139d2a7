"""Tables of results in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from specengine.lab.accept.sheet import Sheet

_WIDE = 200  # columns, where the output is no terminal


def show_sheets(title: str, environment: str, sheets: Iterable[Sheet]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(f"[bold]{title}[/]")
    console.print(environment, highlight=False)
    for sheet in sheets:
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
