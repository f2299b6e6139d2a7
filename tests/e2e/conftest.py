"""SmolLM2 in float32, loaded once a file: that takes longer than what most tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specengine import LLM, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import build_engine, load
from specengine.engine.phases import Phases
from specengine.runner.loader.loaded_model import LoadedModel


class _Lent(LLM):
    def __init__(self, loaded: LoadedModel, spec: SpecConfig | None, **flags: Any) -> None:
        model = loaded.config.model
        given = {"model": model.model, "dtype": model.dtype, **flags}
        self.engine = build_engine(config_from_flags(given, spec), loaded)
        self._count = 0


Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def smollm2_llm(smollm2: str) -> Make:
    """An `LLM` of its own engine: (spec=None, **flags)."""
    loaded = load(config_from_flags({"model": smollm2, "dtype": "float32"}), Phases())

    def make(spec: SpecConfig | None = None, **flags: Any) -> LLM:
        return _Lent(loaded, spec, **flags)

    return make
