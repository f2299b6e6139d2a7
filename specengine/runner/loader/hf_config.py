"""Makes a model's configuration from the fields of a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

from specengine.core.registry import MODEL_FAMILIES
from specengine.runner.loader.family import extended_config
from specengine.runner.loader.language_part import language_config


def make_config(fields: dict[str, Any]) -> Any:
    """A transformers PreTrainedConfig with the defaults of its family; of a multimodal model, that
    of its language part. Raises ValueError for an unknown family, and transformers' own errors for
    invalid fields."""
    from specengine.runner.loader.families import FAMILIES  # slow: imports transformers

    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type names the family, and is {model_type!r}")
    if model_type not in FAMILIES:
        extended, defaults = extended_config(fields.get("architectures"))
        model_type, fields = extended or model_type, {**defaults, **fields}
    if model_type in FAMILIES:
        config = FAMILIES[model_type].from_dict(deepcopy(fields))  # which it updates in place
        return _stretch_context(config, fields)
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        known = ", ".join(MODEL_FAMILIES)
        raise ValueError(
            f"model_type {model_type!r} is not known, nor to transformers; known: {known}"
        )
    config = CONFIG_MAPPING[model_type].from_dict(deepcopy(fields))
    return _stretch_context(language_config(config, fields), fields)


def _stretch_context(config: Any, fields: dict[str, Any]) -> Any:
    """`config` with max_position_embeddings raised to what YaRN stretches the original context to,
    where config.json says both. Users add the scaling as model cards say, and leave that field.
    fields: of config.json."""
    for given in _scalings(fields):
        factor, original = given.get("factor"), given.get("original_max_position_embeddings")
        is_yarn = "yarn" in (given.get("rope_type"), given.get("type"))
        if is_yarn and factor and original:
            stretched = max(int(factor * original), config.max_position_embeddings)
            config.max_position_embeddings = stretched
    return config


def _scalings(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What config.json says of rotary tables, under either name, of a type of layers or of all."""
    for holder, name in product((fields, fields.get("text_config") or {}), _ROTARY_FIELDS):
        given = holder.get(name) or {}
        tables = [one for one in given.values() if isinstance(one, dict)]
        yield from tables or [given]


_ROTARY_FIELDS = ("rope_parameters", "rope_scaling")
