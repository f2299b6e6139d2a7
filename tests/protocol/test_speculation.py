"""Bodies of the table, answered with drafts and without: the same answers.

The drafts are EAGLE-3's and of a fixed depth, so that they stand: with the adaptive choice this
small model would hardly be drafted for. A server of several processes is asked the whole table in
tests/e2e/hostile/test_hostile.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specengine.core.config import SpecConfig
from tests.protocol.answers import ask, assert_drafts_change_nothing, flags_of
from tests.protocol.table import MODELS, Case, cases
from tests.support.live_server import live_server

SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=4)
OFF = {"speculative": {"enabled": False}}


def each_row_once() -> list[Case]:
    """At one of its endpoints, by turns; and what a request says of drafts at each."""
    rows: dict[str, list[Case]] = {}
    for case in cases():
        rows.setdefault(case.row.name, []).append(case)
    found = [at[number % len(at)] for number, at in enumerate(rows.values())]
    return [*{one.name: one for one in [*found, *rows["model"], *rows["speculative"]]}.values()]


def test_each_field_and_each_endpoint_is_among_them() -> None:
    found = each_row_once()
    assert {one.row.name for one in found} == {one.row.name for one in cases()}
    assert {one.path for one in found} == {*MODELS}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(each_row_once(), id="each-row-once"),
        pytest.param([*cases()], id="all", marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_with_drafts_that_stand(asked: list[Case], tmp_path: Path) -> None:
    with live_server(flags_of(tmp_path), SPEC) as live:
        plain = asyncio.run(ask(live.url, asked, OFF))
        assert_drafts_change_nothing(plain, asyncio.run(ask(live.url, asked)))
