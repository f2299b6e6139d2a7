"""Bodies of the table, answered with drafts and without: the same answers.

The drafts are EAGLE-3's and of a fixed depth, so that they stand: with the adaptive choice this
small model would hardly be drafted for. A server of several processes is asked the other half of
the table in tests/e2e/hostile/test_hostile.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specengine.core.config import SpecConfig
from tests.protocol.answers import ask, assert_drafts_change_nothing, flags_of
from tests.protocol.table import MODELS, Case, cases, half
from tests.support.live_server import live_server

SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=4)
OFF = {"speculative": {"enabled": False}}


def test_each_field_at_each_endpoint_is_in_a_half() -> None:
    found = [{one.name for one in half(number)} for number in (0, 1)]
    assert found[0] | found[1] == {one.name for one in cases()}
    of_both = {f"{row} {path}" for row in ("model", "speculative") for path in MODELS}
    assert found[0] & found[1] >= of_both
    for number in (0, 1):
        assert {one.path for one in half(number)} == {*MODELS}
        assert {one.row.name for one in half(number)} == {one.row.name for one in cases()}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(half(0), id="half"),
        pytest.param([*cases()], id="all", marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_with_drafts_that_stand(asked: list[Case], tmp_path: Path) -> None:
    with live_server(flags_of(tmp_path), SPEC) as live:
        plain = asyncio.run(ask(live.url, asked, OFF))
        assert_drafts_change_nothing(plain, asyncio.run(ask(live.url, asked)))
