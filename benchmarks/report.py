"""What every benchmark writes: a dated JSON and Markdown file with hardware, versions, commit."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from specengine.lab.environment import environment, environment_line

RESULTS = Path(__file__).parent / "results"


def write(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    notes: str = "",
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write benchmarks/results/DATE-name.{json,md}; returns the Markdown file's path. facts: the
    environment of a measurement that was made elsewhere; None: it was made here and now."""
    date = datetime.date.today().isoformat()
    facts = environment() if facts is None else facts
    RESULTS.mkdir(exist_ok=True)
    stem = f"{date}-{name}"
    record = {"title": title, "date": date, "environment": facts, "rows": rows, "notes": notes}
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        f"# {title}",
        "",
        f"{date}, {environment_line(facts)}.",
        "",
        f"    {facts['command']}",
        "",
        *table(rows),
    ]
    if notes:
        lines += ["", notes.strip()]
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return []
    keys = list(rows[0])
    body = ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows]
    return ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys), *body]


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )
