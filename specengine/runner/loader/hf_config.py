"""A model's configuration, from what a config.json holds."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


def make_config(fields: dict[str, Any]) -> Any:
    """A transformers PreTrainedConfig, with the defaults of its family. Raises ValueError for a
    family that is not known, and what transformers raises for fields that make no sense."""
    from specengine.runner.loader.families import FAMILIES  # not before a model is looked for

    fields = deepcopy(fields)  # older forms in it are brought up to date in place
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type names the family, and is {model_type!r}")
    if model_type in FAMILIES:
        return FAMILIES[model_type].from_dict(fields)
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"model_type {model_type!r} is not known, nor to transformers; known: {known}"
        )
    return CONFIG_MAPPING[model_type].from_dict(fields)
