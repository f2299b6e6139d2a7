"""The tables of docs/support.md, out of the registries and of what tests are parametrised by.

``python -m tests.support.support_table`` writes the page anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.families import FAMILIES
from tests.support.held_by import (
    ALWAYS,
    COLUMNS,
    DRAFTS,
    QUANTISATIONS,
    ROOT,
    SLOW,
    WAYS,
    held,
)

PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- made by tests/support/support_table.py -->", "<!-- end of what is made -->"
NOTHING = "–"
SUFFIX = "ForCausalLM"


class Tables:
    """Cells name tests by short words, which stand for links below the tables."""

    def __init__(self) -> None:
        self.held = held()
        self.words: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        rows = {family: name.removesuffix(SUFFIX) for family, name in FAMILIES.items()}
        yield from self._table("family", rows, COLUMNS)
        yield ""
        yield from self._table("quantisation", {one: one for one in QUANTISATIONS}, DRAFTS)
        yield ""
        for test, word in self.words.items():
            yield f"[{word}]: ../{test.replace('::', '#')}"

    def _table(self, title: str, rows: dict[str, str], columns: tuple[str, ...]) -> Iterator[str]:
        yield f"| {title} | " + " | ".join(columns) + " |"
        yield "|---" * (1 + len(columns)) + "|"
        for row, name in rows.items():
            yield f"| {name} | " + " | ".join(self._cell(row, one) for one in columns) + " |"

    def _cell(self, row: str, column: str) -> str:
        """The most that is run of it, and what a GPU runs beside."""
        runs = self.held.get((row, column), {})
        ways = [way for way in WAYS if way in runs and not (way == SLOW and ALWAYS in runs)]
        return " ".join(f"[{way}][{self._word(runs[way])}]" for way in ways) or NOTHING

    def _word(self, test: str) -> str:
        if test not in self.words:
            stem = Path(test.partition("::")[0]).stem.removeprefix("test_")
            count = sum(one.partition("/")[0] == stem for one in self.words.values())
            self.words[test] = f"{stem}/{count + 1}" if count else stem
        return self.words[test]


def page() -> str:
    """What stands between BEGIN and END."""
    return "\n".join([BEGIN, "", *Tables().lines(), "", END])


def replace_made(text: str) -> str:
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda match: page(), text)


if __name__ == "__main__":
    PAGE.write_text(replace_made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
