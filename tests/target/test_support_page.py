"""docs/support.md says what the registries and the tests say."""

from __future__ import annotations

import re

import pytest

from specengine.core.registry import DRAFTERS, LOAD_QUANTIZATIONS, MODEL_FAMILIES, QUANTIZATIONS
from tests.support.held_by import COLUMN_OF, COLUMNS, SOURCES, WRITTEN, cases_of, words_of
from tests.support.quantised import FORMATS
from tests.support.support_table import PAGE, replace_made

# Column of what no checkpoint in tests/support/quantised.py has.
OTHERS = {"mxfp4": "MXFP4", "gguf": "GGUF kept", "fp8": "FP8 on load"}


def test_page_is_what_the_registries_and_tests_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_made(text), "run python -m tests.support.support_table"
    rows = [name.removesuffix("ForCausalLM") for name in MODEL_FAMILIES]
    assert re.findall(r"^\| (\w+) \| (?:–|\[✓\]\[)", text, re.MULTILINE)[: len(rows)] == rows


def test_page_says_what_each_column_is() -> None:
    legend = PAGE.read_text(encoding="utf-8").partition("## Columns")[2].partition("\n##")[0]
    said = re.findall(r"^\| ([^|]+) \|", legend, re.MULTILINE)
    assert {one for names in said for one in (names, *names.split(", "))} >= {*COLUMNS}


def test_each_drafter_and_quantisation_has_a_column() -> None:
    assert DRAFTERS.keys() <= {*COLUMNS}
    assert COLUMN_OF.keys() == FORMATS.keys()
    methods = {form.config.get("quant_method", "modelopt") for form in FORMATS.values()}
    assert methods | {"mxfp4"} == QUANTIZATIONS.keys()
    assert {"mxfp4", *LOAD_QUANTIZATIONS} == OTHERS.keys()
    assert {*OTHERS.values()} <= {*COLUMNS}


def test_what_a_test_always_runs_is_written_there() -> None:
    for source in SOURCES:
        words = words_of(source.test) if source.constants else set[str]()
        for one in source.constants:
            assert words & {*WRITTEN.get(one, (one,))}, f"{one} is not in {source.test}"


def test_words_of_a_test_are_those_of_what_it_uses_of_its_file() -> None:
    """Its fixtures, and what these use; and of no other test."""
    words = words_of("tests/e2e/test_fp8_kv_engine.py::test_each_kind_of_drafts_changes_no_token")
    assert {"llama", "kv_cache_dtype", "EAGLE3"} <= words
    assert not words & {"qwen3", "gemma3", "NGRAM"}


def test_cases_have_the_marks_of_file_function_and_parameter() -> None:
    class File:
        pytestmark = pytest.mark.slow

        @staticmethod
        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.model)])
        @pytest.mark.parametrize(("b", "c"), [(3, 4)])
        def test_one() -> None: ...

        @staticmethod
        @pytest.mark.gpu
        def test_other() -> None: ...

    found = [(one.given, one.runs) for one in cases_of(File, "test_one")]
    assert found == [({"a": 1, "b": 3, "c": 4}, "slow"), ({"a": 2, "b": 3, "c": 4}, "✓")]
    assert [one.runs for one in cases_of(File, "test_other")] == ["GPU"]
