"""What every benchmark writes: a dated JSON and Markdown file with hardware, versions, commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "triton")},
    }


def write(name: str, title: str, rows: list[dict[str, Any]], notes: str = "") -> Path:
    """Write benchmarks/results/DATE-name.{json,md}; returns the Markdown file's path."""
    date = datetime.date.today().isoformat()
    facts = environment()
    RESULTS.mkdir(exist_ok=True)
    stem = f"{date}-{name}"
    record = {"title": title, "date": date, "environment": facts, "rows": rows, "notes": notes}
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    lines = [
        f"# {title}",
        "",
        f"{date}, commit {facts['commit']}, {facts['gpu'] or facts['cpu']} "
        f"({facts['cores']} cores, {facts['threads']} threads), Python {facts['python']}, "
        f"{versions}.",
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
