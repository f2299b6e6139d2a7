"""Hooks on the layers of an engine's target."""

from __future__ import annotations

from specengine.core.errors import ConfigError
from specengine.engine.loop import Engine
from specengine.runner.layer_hooks import AddedHook, LayerHook


def add_layer_hook(engine: Engine, pattern: str, hook: LayerHook) -> AddedHook:
    """Between two steps. Raises ConfigError for a pattern that matches no layer, and for an engine
    whose forwards would not all call it."""
    parts = engine.parts
    if parts.link.communicator.size > 1 or parts.sharers is not None:
        raise ConfigError("layers of several ranks have no hooks: --tp-size 1, --dp-size 1")
    if engine.split is not None:
        raise ConfigError("split prompts call no hooks of layers: leave out --enable-pdmux")
    engine.finish_rounds()
    return parts.worker.runner.hooks.add(pattern, hook)
