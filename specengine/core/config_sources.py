"""Where a configuration comes from: flags before environment before YAML file before defaults."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.options import HIDDEN, Option
from specengine.core.section import Section

PREFIX = "SPECENGINE_"
# Read elsewhere, and no options: the commit that results name, the folder of prompts and data, 0 to
# do without compiled operations on CPU, and the wheel that holds the built-in model.
OTHER_VARIABLES = (
    "SPECENGINE_COMMIT",
    "SPECENGINE_DATA_DIR",
    "SPECENGINE_NATIVE",
    "SPECENGINE_SMOLLM2_WHEEL",
)


@cache
def sections() -> dict[str, type[Section]]:
    """The sections of EngineConfig by field name."""
    hints = get_type_hints(EngineConfig)
    return {f.name: hints[f.name] for f in fields(EngineConfig)}


@cache
def config_options() -> dict[str, Option]:
    """Every option by key (`page_size`, `speculative_algorithm`), in the order of the fields."""
    return {one.key: one for section in sections().values() for one in section.options().values()}


def config_from_flags(values: Mapping[str, Any], spec: SpecConfig | None = None) -> EngineConfig:
    """The configuration with these values by key, defaults elsewhere; `spec` replaces that section.

    Raises ConfigError for an unknown key, naming close ones, or for a value that does not fit.
    """
    _check_known(values, "option")
    if spec is not None:
        clash = [one.key for one in SpecConfig.options().values() if one.key in values]
        if clash:
            raise ConfigError(f"{clash[0]} is given twice: by itself and in the SpecConfig")
    made: dict[str, Any] = {
        name: section(
            **{one.name: values[one.key] for one in section.options().values() if one.key in values}
        )
        for name, section in sections().items()
    }
    return EngineConfig(**(made | ({"spec": spec} if spec is not None else {})))


def resolve_sources(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> EngineConfig:
    """Flags over `environment` over the YAML `file` over defaults."""
    values = dict(_from_file(file)) if file is not None else {}
    values.update(_from_environment(environment))
    values.update(flags)
    return config_from_flags(values)


def shown(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Values by section and field, secrets hidden."""
    values = asdict(config)
    for name, section in sections().items():
        for one in section.options().values():
            if one.is_secret and values[name][one.name] is not None:
                values[name][one.name] = HIDDEN
    return values


def to_yaml(config: EngineConfig) -> str:
    """The configuration as a YAML file that gives it back, but for secrets: these are hidden, and
    the file is refused until they are filled in."""
    lines = []
    values = shown(config)
    for name, section in sections().items():
        lines.append(f"# {name}")
        options = section.options().values()
        lines += (f"{one.key}: {json.dumps(values[name][one.name])}" for one in options)  # YAML too
    return "\n".join(lines) + "\n"


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {one.variable: one for one in config_options().values()}
    allowed = [*known, *OTHER_VARIABLES]
    for name in environment:
        if name.startswith(PREFIX) and name not in allowed:
            near = _close(name, allowed) or "; unset it"
            raise ConfigError(f"the environment variable {name} is not known{near}")
    return {
        one.key: one.parse(environment[variable], variable)
        for variable, one in known.items()
        if variable in environment
    }


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold one `key: value` a line, such as `page_size: 16`")
    _check_known(loaded, f"{path}: key")
    return {key: config_options()[key].check(v, f"{path}: {key}") for key, v in loaded.items()}


def _check_known(values: Mapping[Any, Any], what: str) -> None:
    for key in values:
        if key not in config_options():
            raise ConfigError(f"{what} {key!r} is not known{_close(str(key), config_options())}")


def _close(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
