"""JSON that goes out. What clients sent may be part of it."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson


def dumps(payload: Any) -> bytes:
    """orjson's, which is fast and refuses two things that a client's own JSON may hold: whole
    numbers beyond 64 bits, and halves of surrogate pairs."""
    try:
        return orjson.dumps(payload)
    except TypeError:
        return json.dumps(_finite(payload), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    """As orjson has it: numbers that JSON has not are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
