"""What was proved already, in a file: an interrupted proof goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError
from specengine.engine.proof.check import Check


class ProofRecord:
    """One JSON object a line: first what the proof is about and where it was begun, then each
    section with its checks. A line that was cut off counts as not there. Raises ConfigError where
    the file is about another proof."""

    def __init__(self, path: Path, about: dict[str, Any], environment: dict[str, Any]) -> None:
        self.path = path
        self.sections: dict[str, list[Check]] = {}
        lines = _lines(path)
        if not lines:
            first = {"about": about, "environment": environment}
            path.write_text(json.dumps(first) + "\n")
        elif lines[0].get("about") != json.loads(json.dumps(about)):
            raise ConfigError(f"--record {path} is of another proof; name a new file, or remove it")
        for line in lines[1:]:
            self.sections[line["section"]] = [Check(**check) for check in line["checks"]]

    def add(self, section: str, checks: list[Check]) -> None:
        self.sections[section] = checks
        line = {"section": section, "checks": [asdict(check) for check in checks]}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only; what follows the last of them is removed."""
    if not path.exists():
        return []
    whole, end, _ = path.read_text().rpartition("\n")
    path.write_text(whole + end)
    return [json.loads(line) for line in whole.splitlines()]
