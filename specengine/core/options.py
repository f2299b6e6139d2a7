"""Typed options: how one dataclass field becomes a flag, a variable, a key, and a checked value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from specengine.core.errors import ConfigError

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = frozenset({"none", "null"})


NO_OPTION = {"option": False}  # metadata of a field that is no option


HIDDEN = "(hidden)"  # stands for a secret where a configuration is shown


def option(
    default: Any,
    help: str,
    choices: tuple[Any, ...] | None = None,
    is_secret: bool = False,
    owners: tuple[str, ...] = (),
) -> Any:
    """A configuration field with its help text, and the values it may take. is_secret: its value
    is not shown, neither in repr nor where a configuration is printed. owners: the option does
    nothing unless one of these is in use; what they name, its section says."""
    metadata = {"help": help, "choices": choices, "is_secret": is_secret, "owners": owners}
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One field of a configuration or parameter dataclass.

    base: bool, int, float, str, tuple or dict; `items` are the element types of the last two.
    """

    name: str
    prefix: str
    base: type
    items: tuple[type, ...]
    is_optional: bool
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    is_secret: bool = False
    owners: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.prefix + self.name

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SPECENGINE_" + self.key.upper()

    def parse(self, text: str, source: str | None = None) -> Any:
        """The value that `text` stands for. ConfigError names `source`, or else the flag."""
        source = source or self.flag
        if self.is_optional and text.strip().lower() in _NONE:
            return None
        return self.check(self._from_text(text, source), source)

    def check(self, value: Any, source: str | None = None) -> Any:
        """`value`, as the type of the field wants it; ConfigError where it does not fit."""
        source = source or self.flag
        if value is None and self.is_optional:
            return None
        if self.choices is not None:
            return self._choose(value, source)
        if self.base is tuple and isinstance(value, list | tuple):
            return tuple(self._scalar(self.items[0], item, source) for item in value)
        if self.base is dict and isinstance(value, Mapping):
            key, item = self.items
            return {
                self._scalar(key, k, source): self._scalar(item, v, source)
                for k, v in value.items()
            }
        return self._scalar(self.base, value, source)

    def wanted(self) -> str:
        """What the value may be, in words."""
        if self.choices is not None:
            return "one of " + ", ".join("none" if c is None else str(c) for c in self.choices)
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        if self.base is tuple:
            return f"a list, each {names[self.items[0]]}"
        if self.base is dict:
            return "pairs ID=NUMBER"
        return names[self.base]

    def _from_text(self, text: str, source: str) -> Any:
        if self.base is bool:
            return self._bool_from_text(text.strip().lower(), source)
        if self.base is tuple:
            if self.items[0] is str:
                return (text,)
            parts = re.split(r"[,\s]+", text.strip())
            return [self._number_from_text(self.items[0], part, source) for part in parts if part]
        if self.base is dict:
            pairs = [pair.partition("=") for pair in re.split(r"[,\s]+", text.strip()) if pair]
            key, item = self.items
            return {
                self._number_from_text(key, k, source): self._number_from_text(item, v, source)
                for k, _, v in pairs
            }
        return text if self.base is str else self._number_from_text(self.base, text, source)

    def _bool_from_text(self, text: str, source: str) -> bool:
        if text not in _TRUE | _FALSE:
            raise self._refusal(text, source)
        return text in _TRUE

    def _number_from_text(self, kind: type, text: str, source: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise self._refusal(text, source) from None

    def _choose(self, value: Any, source: str) -> Any:
        assert self.choices is not None
        for choice in self.choices:
            if value == choice or str(value).lower() == str(choice).lower():
                return choice
        raise self._refusal(value, source)

    def _scalar(self, kind: type, value: Any, source: str) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._refusal(value, source)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refusal(value, source)
        return value

    def _refusal(self, value: Any, source: str) -> ConfigError:
        return ConfigError(f"{source} must be {self.wanted()}, got {value!r}")


def options_of(owner: type[Any], prefix: str = "") -> Mapping[str, Option]:
    """The options that the fields of the dataclass `owner` stand for, by field name."""
    return _options_of(owner, prefix)  # type: ignore[arg-type]  # mypy takes the instances' hash


@cache
def _options_of(owner: Any, prefix: str) -> Mapping[str, Option]:
    hints = get_type_hints(owner)
    found = {
        f.name: _option(f, hints[f.name], prefix)
        for f in fields(owner)
        if f.metadata.get("option", True)
    }
    return MappingProxyType(found)


def _option(f: Any, hint: Any, prefix: str) -> Option:
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    (kind,) = [member for member in members if member is not NoneType]
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return Option(
        name=f.name,
        prefix=prefix,
        base=get_origin(kind) or kind,
        items=tuple(item for item in get_args(kind) if item is not Ellipsis),
        is_optional=NoneType in members,
        default=default,
        help=f.metadata.get("help", ""),
        choices=f.metadata.get("choices"),
        is_secret=f.metadata.get("is_secret", False),
        owners=f.metadata.get("owners", ()),
    )
