"""The base of every request body."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from specengine.core.errors import RequestError
from specengine.server.errors import ApiError


class Strict(BaseModel):
    """Refuses what it does not know, and what it knows but cannot do.

    `unsupported` holds such fields of OpenAI's API, each with the values that ask for nothing.
    `instead` says what asks here for what other APIs call by the name.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    instead: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.unsupported.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise RequestError(f"{name} is not supported; leave it out", name)
        known = _names(cls)
        if data.keys() <= known:
            return data
        taken = known | cls.unsupported.keys()
        unknown = next((name for name in data if name not in taken), None)
        if unknown in cls.instead:
            message = f"{unknown} is not a parameter of this endpoint; use {cls.instead[unknown]}"
            raise ApiError(400, message, unknown, "unknown_param")
        kept = known if unknown is None else known | {unknown}  # one error, however many there are
        return {name: value for name, value in data.items() if name in kept}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Of its fields, as they are written in a body."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())
