"""What an output must follow: the grammar asked for, its state, and what a row may say.

llguidance compiles and follows them (engine/grammar); this is what other packages see of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from specengine.core.errors import RequestError

if TYPE_CHECKING:  # the command line's --help imports this file, and may not wait for PyTorch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Words = NDArray[np.int32]

# Whitespace between the parts of a JSON document. Unbounded, a model can go on with it for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"

MAX_NESTING = 500  # lists and dicts inside one another

KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as text. Use the constructors.

    kind: "json_schema" (text: the schema), "json_object" (any object, no text), "regex" (the whole
    output matches; syntax of Rust's regex crate), "ebnf" (llguidance's Lark dialect, or GBNF),
    "choice" (text: a JSON list of strings). param: the field that errors name. frame: what the
    output follows around it, a grammar in llguidance's Lark dialect that names it @body.
    """

    kind: str
    text: str
    param: str = field(default="grammar", compare=False)
    frame: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise RequestError(f"no grammar kind {self.kind!r}; known are {known}", self.param)
        text: Any = self.text
        if not isinstance(text, str):
            raise RequestError(f"the {self.kind} of {self.param} must be a text", self.param)
        if self.kind == "choice" and not _are_choices(text):
            raise RequestError(
                f"the choices of {self.param} must be a list of texts, none of them empty",
                self.param,
            )

    @classmethod
    def json_schema(cls, schema: Any, param: str = "grammar") -> GrammarSpec:
        """schema: a JSON schema, as a mapping or as JSON text."""
        return cls("json_schema", _as_json(schema, param), param)

    @classmethod
    def json_object(cls, param: str = "grammar") -> GrammarSpec:
        return cls("json_object", "", param)

    @classmethod
    def regex(cls, pattern: str, param: str = "grammar") -> GrammarSpec:
        return cls("regex", pattern, param)

    @classmethod
    def ebnf(cls, text: str, param: str = "grammar") -> GrammarSpec:
        return cls("ebnf", text, param)

    @classmethod
    def choice(cls, choices: Sequence[str], param: str = "grammar") -> GrammarSpec:
        return cls("choice", _as_json(choices, param), param)


def _are_choices(text: str) -> bool:
    try:
        choices = json.loads(text)
    except ValueError:
        return False
    is_list = isinstance(choices, list) and len(choices) > 0
    return is_list and all(isinstance(choice, str) and choice for choice in choices)


def is_nested_deeply(value: Any) -> bool:
    """Whether it exceeds MAX_NESTING. How deep Python's own functions go
    differs between its versions, and deep in the stack they go less far."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _as_json(value: Any, param: str) -> str:
    if isinstance(value, str):
        return value
    if is_nested_deeply(value):
        raise RequestError(f"{param} is nested too deeply; flatten it", param)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param) from error


class GrammarState(Protocol):
    """The state of one request's output in its grammar. Between forwards it is after the
    committed tokens; code that explores a draft takes its tokens back before the next forward."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot be followed further: a limit of the parser was hit."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token. False, and nothing changes, where the grammar forbids it. The tokens
        that end a text are allowed where the grammar can end."""
        ...

    def take_back(self, count: int) -> None:
        """Undo the last `count` tokens."""
        ...

    def fill_mask(self, words: Words) -> None:
        """Write which tokens may follow: bit v % 32 of word v // 32, the lowest first."""
        ...


@dataclass(frozen=True)
class TokenMask:
    """Which tokens the grammars leave to rows of logits, R rows of which M have a grammar."""

    words_MW: Tensor  # int32, W = ceil(V / 32) or more: bit v % 32 of word v // 32 allows token v
    slots_R: Tensor  # int32, row of words_MW; -1 where every token is allowed
