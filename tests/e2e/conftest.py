"""SmolLM2 in float32, loaded once a process: that takes longer than what most tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specengine import LLM, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import build_engine, load
from specengine.engine.phases import Phases

Make = Callable[..., LLM]


@pytest.fixture(scope="session")
def smollm2_llm(smollm2: str) -> Make:
    """An `LLM` of its own engine: (spec=None, **flags)."""
    weights = {"model": smollm2, "dtype": "float32"}
    loaded = load(config_from_flags(weights), Phases())

    def make(spec: SpecConfig | None = None, **flags: Any) -> LLM:
        return LLM.of(build_engine(config_from_flags({**weights, **flags}, spec), loaded))

    return make
