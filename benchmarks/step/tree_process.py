"""A command on the sources of one tree, in a process of its own that answers lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class TreeProcess:
    """log: gets what it writes to standard error."""

    def __init__(self, tree: Path, command: Sequence[str], log: Path) -> None:
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """What it says next. Raises SystemExit where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended; see {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, **asked: Any) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
