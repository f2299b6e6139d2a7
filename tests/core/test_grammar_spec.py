from __future__ import annotations

from typing import Any

import pytest

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams


def test_equal_grammars_are_equal_whatever_named_them() -> None:
    assert GrammarSpec.regex("a", "response_format") == GrammarSpec.regex("a")
    assert len({GrammarSpec.regex("a"), GrammarSpec.regex("a", "x"), GrammarSpec.ebnf("a")}) == 2


def test_schemas_are_text() -> None:
    assert GrammarSpec.json_schema({"const": "é"}).text == '{"const": "é"}'
    assert GrammarSpec.json_schema('{"const": 1}').text == '{"const": 1}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("xml", ""),
        ("regex", 5),
        ("choice", "["),
        ("choice", "[]"),
        ("choice", '""'),
        ("choice", "[1]"),
        ("choice", '["a", ""]'),
    ],
)
def test_what_is_no_grammar(kind: str, text: Any) -> None:
    with pytest.raises(RequestError) as error:
        GrammarSpec(kind, text, "field")
    assert error.value.param == "field"


def test_a_schema_that_is_no_json() -> None:
    for schema in ({"const": {1, 2}}, {"const": float("nan")}):
        with pytest.raises(RequestError, match="not valid JSON"):
            GrammarSpec.json_schema(schema)


def test_deeply_nested_schema_is_refused() -> None:
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested too deeply"):
        GrammarSpec.json_schema(nested)


def test_sampling_params_take_nothing_else() -> None:
    grammar: Any = "a+"
    with pytest.raises(RequestError, match="GrammarSpec"):
        SamplingParams(grammar=grammar)
