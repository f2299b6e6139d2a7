"""Settings of data generation from a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError
from specengine.lab.generate.config import GenerationConfig


def read_recipe(path: Path | None, given: Mapping[str, Any]) -> GenerationConfig:
    """`given` over the file over defaults. Raises ConfigError for an unknown key, naming a close
    one, or for a value that does not fit."""
    values = _load(path) if path is not None else {}
    options = GenerationConfig.options()
    for key in values:
        if key not in options:
            near = difflib.get_close_matches(str(key), options, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: key {key!r} is not known{hint}")
    checked = {key: options[key].check(value, f"{path}: {key}") for key, value in values.items()}
    return GenerationConfig(**(checked | dict(given)))


def _load(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --recipe {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold one `key: value` a line, such as `max_tokens: 100000`")
    return loaded
