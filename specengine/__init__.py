"""specengine: a speculative-decoding engine and laboratory.

Importing the package is free of heavy imports: the public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.core.version import __version__

if TYPE_CHECKING:
    from specengine.core.config import SpecConfig
    from specengine.core.grammar import GrammarSpec
    from specengine.core.sampling import SamplingParams, SpecControl
    from specengine.engine.llm import LLM

__all__ = ["LLM", "GrammarSpec", "SamplingParams", "SpecConfig", "SpecControl", "__version__"]

_HOMES = {
    "GrammarSpec": "specengine.core.grammar",
    "LLM": "specengine.engine.llm",
    "SamplingParams": "specengine.core.sampling",
    "SpecConfig": "specengine.core.config",
    "SpecControl": "specengine.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
