"""What plain decoding says, asked once a process: many rounds are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specengine import LLM, SamplingParams
from specengine.engine.llm import Generation

_SAID: dict[str, list[Generation]] = {}


def plain_says(
    folder: Path, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], **flags: Any
) -> list[Generation]:
    """What a target of random weights generates, in rounds of the host where graphs are off."""
    asked = repr((str(folder), prompts, params, sorted(flags.items())))
    if asked not in _SAID:
        llm = LLM(str(folder), None, **{"dtype": "float32", "max_total_tokens": 2048} | flags)
        _SAID[asked] = llm.generate([*prompts], [*params])
    return _SAID[asked]
