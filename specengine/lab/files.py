"""Results in files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """In one piece. Raises ConfigError where that cannot be done."""
    half = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def finite(value: Any) -> Any:
    """The value, with None for what JSON cannot say: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
