"""What the sections of a configuration share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from specengine.core.errors import ConfigError
from specengine.core.options import Option, options_of


class Section:
    """A part of the configuration whose fields are options."""

    flag_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, one in self.options().items():
            object.__setattr__(self, name, one.check(getattr(self, name)))
        self._check_ranges()

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        return options_of(cls, cls.flag_prefix)

    def _check_ranges(self) -> None:
        """Raise ConfigError where a value of the right type makes no sense."""

    def _at_least(self, low: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value >= low, name, f"must be at least {low}")

    def _refuse_given(self, names: Iterable[str], needed: str) -> None:
        """Of options that do nothing without another, which is missing."""
        for name in names:
            is_default = getattr(self, name) == self.options()[name].default
            self._require(is_default, name, f"does nothing without {needed}")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{self.options()[name].flag} {getattr(self, name)!r}: {rule}")
