"""How much KV memory an engine is built with."""

from __future__ import annotations

from pathlib import Path

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig
from specengine.engine.build import build_engine


def test_memory_that_is_no_whole_number_of_pages(small_models: dict[str, Path]) -> None:
    """Its last slots are left over; that is no lack of memory."""
    config = EngineConfig(
        model=ModelConfig(model=str(small_models["llama"])),
        memory=MemoryConfig(page_size=16, max_total_tokens=500),
    )
    assert build_engine(config).stats().num_slots == 496
