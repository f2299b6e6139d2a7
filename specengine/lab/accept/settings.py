"""What is compared: named ways to speculate."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError

_PREFIX = SpecConfig.flag_prefix


@dataclass(frozen=True)
class Setting:
    name: str
    spec: SpecConfig

    @property
    def given(self) -> dict[str, Any]:
        """Its options that are not the defaults."""
        plain = SpecConfig()
        values = {name: getattr(self.spec, name) for name in SpecConfig.options()}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}


def parse_setting(text: str, base: SpecConfig) -> Setting:
    """`NAME: algorithm=EAGLE3 num_steps=5 …`; values with blanks in them go in quotes. What is left
    out is as in `base`. Raises ConfigError."""
    name, colon, options = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(
            f'--setting {text!r}: give a name and options, such as "chain of 5: algorithm=EAGLE3 '
            'draft_model_path=DIR num_steps=5"'
        )
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--setting {text!r}: {error}") from error
    wrong = next((word for word in words if "=" not in word), None)
    if wrong is not None:
        raise ConfigError(f"--setting {text!r}: {wrong!r} is not of the form OPTION=VALUE")
    values = dict(word.split("=", 1) for word in words)
    return _setting(name.strip(), values, base, f"--setting {name.strip()}")


def read_settings(path: Path, base: SpecConfig) -> list[Setting]:
    """A YAML file: a mapping of names to options, or a list of options with a `name` each. Raises
    ConfigError."""
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --settings {path}: {error}") from error
    entries: Any = loaded.items() if isinstance(loaded, dict) else _named(loaded, path)
    settings = []
    for name, options in entries:
        if not isinstance(options, dict | None):
            raise ConfigError(f"{path}: {name} must be a mapping, such as `num_steps: 5`")
        settings.append(_setting(str(name), options or {}, base, f"{path}: {name}"))
    return settings


def check_names(settings: Sequence[Setting]) -> None:
    """Raises ConfigError unless there are settings, each of a name of its own."""
    if not settings:
        raise ConfigError(
            "nothing to measure: give --setting, --settings or --speculative-algorithm"
        )
    names = [setting.name for setting in settings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two settings are called {twice!r}; give each a name of its own")


def _named(loaded: Any, path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(loaded, list) or not all(
        isinstance(one, dict) and "name" in one for one in loaded
    ):
        raise ConfigError(
            f"{path} must be a list of settings, each with a `name`, or map names to options"
        )
    return [(one["name"], {k: v for k, v in one.items() if k != "name"}) for one in loaded]


def _setting(name: str, values: Mapping[str, Any], base: SpecConfig, source: str) -> Setting:
    known = SpecConfig.options()
    found = {}
    for key, value in values.items():
        option = known.get(str(key).removeprefix(_PREFIX))
        if option is None:
            near = difflib.get_close_matches(str(key), known, n=2, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"{source}: there is no option {key!r}{hint}")
        where = f"{source}: {option.name}"
        is_text = isinstance(value, str)
        found[option.name] = option.parse(value, where) if is_text else option.check(value, where)
    return Setting(name, replace(base, **found))
