"""The table has every field, and the page shows the table."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.server.native.sampling import NativeSampling
from tests.protocol.draw import PAGE, drawn
from tests.protocol.table import BASE, GENERATE, MODELS, NATIVE, ROWS, cases, own_name


def test_the_page_is_drawn_anew_when_the_table_changes() -> None:
    assert PAGE.read_text() == drawn(), "run `python -m tests.protocol.draw`"


@pytest.mark.parametrize("path", MODELS)
def test_every_field_has_a_row(path: str) -> None:
    fields = set(MODELS[path].model_fields)
    if path == GENERATE:
        fields |= set(NativeSampling.model_fields)
    rows = [own_name(path, row.name) for row in ROWS]
    assert fields == {name for name in rows if name is not None}


def test_every_row_is_of_some_endpoint_and_stands_once() -> None:
    names = [row.name for row in ROWS]
    assert sorted(names) == sorted(set(names))
    assert set(names) == {case.row.name for case in cases()}
    assert NATIVE.keys() <= set(names)


def test_every_case_uses_its_field() -> None:
    for case in cases():
        own = own_name(case.path, case.row.name)
        assert own in case.body or own in case.body.get("sampling_params", {}), case.name


def test_generate_is_asked_for_one_prompt_and_lists_whole_and_streamed() -> None:
    bodies = [case.body for case in cases() if case.path == GENERATE]
    forms = {(isinstance(one.get("text"), list), one.get("stream", False)) for one in bodies}
    assert forms == {(False, False), (False, True), (True, False), (True, True)}
    by_row = {case.row.name: case.body for case in cases() if case.path == GENERATE}
    assert (len(by_row["n"]["text"]), by_row["n"]["sampling_params"]["n"]) == (2, 2)
    assert isinstance(by_row["rid"]["rid"], list)


REFUSED = [
    (path, name) for path, model in MODELS.items() for name in getattr(model, "unsupported", {})
]


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_known_fields_are_refused_by_name(site: Any, engine: Any, path: str, name: str) -> None:
    model = {"model": "fake"}
    base = {k: v for k, v in BASE[path].items() if not k.startswith("max")}
    error = site.refusal(path, 400, **(base | model), **{name: {"unheard": 1}})
    assert error["param"] == name
    assert name in error["message"]
    for harmless in (None, *MODELS[path].unsupported[name]):
        answer = site.post(path, **(base | model), **{name: harmless})
        assert answer.status_code == 200, answer.text
