"""Scripts that stand for those of benchmarks/peers."""

from __future__ import annotations

import sys
from pathlib import Path

_PEERS = Path(__file__).parents[2] / "benchmarks/peers"
_HEAD = """#!{python}
import pathlib, sys, time
sys.path.insert(0, {folder!r})
from turns import turn
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--json") + 1])
turns = pathlib.Path(words[words.index("--turns") + 1])
"""


def peer_script(folder: Path, body: str) -> str:
    """A file in `folder` that runs `body`, which may use turn, words (the arguments), out (of
    --json) and turns (the folder of --turns)."""
    path = folder / "peer"
    head = _HEAD.format(python=sys.executable, folder=str(_PEERS))
    path.write_text(head + body)
    path.chmod(0o755)
    return str(path)
