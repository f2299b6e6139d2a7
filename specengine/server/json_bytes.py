"""JSON that goes out. What clients sent may be part of it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from typing import Any

import orjson

Json = dict[str, Any]


def dumps(payload: Any) -> bytes:
    """orjson's, which is fast and refuses two things that a client's own JSON may hold: whole
    numbers beyond 64 bits, and halves of surrogate pairs."""
    try:
        return orjson.dumps(payload)
    except TypeError:
        return json.dumps(_finite(payload), separators=(",", ":")).encode()


async def encoded(values: Iterable[Any]) -> list[orjson.Fragment]:
    """Each as JSON, for `dumps`. Other work has its turn between two of them: a choice of 2,000
    tokens with 20 log-probabilities each takes 30 ms, and there may be a hundred. values: best made
    as they are asked for, so that no two are held."""
    found = []
    for value in values:
        found.append(orjson.Fragment(dumps(value)))
        await asyncio.sleep(0)
    return found


def _finite(value: Any) -> Any:
    """As orjson has it: numbers that JSON has not are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
