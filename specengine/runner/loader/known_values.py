"""Fields of a configuration that may have known values alone."""

from __future__ import annotations

from typing import Any

from specengine.core.errors import ModelLoadError


def require(config: Any, **known: tuple[Any, ...]) -> None:
    """Raises ModelLoadError for a field that is there with another value than the known ones."""
    for name, values in known.items():
        found = getattr(config, name, values[0])
        if found not in values:
            raise ModelLoadError(
                f"{name} {found!r} is not supported; known: {', '.join(map(repr, values))}"
            )
