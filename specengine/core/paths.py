"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(written: str | Path) -> Path:
    """With the home directory for a leading ~ or ~user. It stays as it is where the user is not
    known here: there is no such file then, which callers say; Path.expanduser raises
    RuntimeError."""
    return Path(os.path.expanduser(written))
