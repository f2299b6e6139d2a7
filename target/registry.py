"""Model classes by the name that config.json gives in `architectures`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.core.registry import MODEL_FAMILIES, load_place


def find_model_class(architectures: Sequence[str]) -> Any:
    """The class of the first known name. Raises ModelLoadError listing the known ones."""
    for name in architectures:
        if name in MODEL_FAMILIES:
            return load_place(MODEL_FAMILIES[name])
    known = ", ".join(MODEL_FAMILIES)
    raise ModelLoadError(
        f"architecture {' or '.join(architectures) or '(none named)'} is not supported; "
        f"known: {known}"
    )
