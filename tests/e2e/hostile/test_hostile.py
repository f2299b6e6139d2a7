"""A server of several processes under attack, and under a soak: small versions of what attack.py
and soak.py do with 10,000 requests. Only the slow ones look at the time of probes and at memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hostile import attack, soak
from tests.e2e.hostile.bodies import GRAMMARS, Mutations, known
from tests.e2e.hostile.watch import GROWTH, Holdings, Probes
from tests.protocol.answers import (
    ask,
    assert_drafts_change_nothing,
    assert_same,
    flags_of,
    num_accepted,
    settled,
)
from tests.protocol.table import MODELS, Case, cases, half
from tests.support.live_server import live_server
from tests.support.processes import Served, serving


def test_hostile_requests_cost_nothing_but_refusals(served: Served) -> None:
    before = len(served.log.read_text())
    outcome = attack.attack(served, 80, warm_up=0, haste=4, draws=False)
    assert outcome.num_sent == 80
    assert outcome.bad == []
    assert outcome.probes.failed == []
    assert outcome.slots_amid_stream > 0
    assert (outcome.used_slots, outcome.restarted) == (0, 0)
    assert "Traceback" not in served.log.read_text()[before:]


def soaked() -> list[soak.Body]:
    """What is mixed: a fifth of the table's bodies, and of the longer ones."""
    return soak.bodies()[::5]


class Plain:
    """Answers of an engine that does not draft, in this process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._said: dict[str, Any] = {}

    def __call__(self, asked: Sequence[soak.Body]) -> dict[str, Any]:
        """By name; each is asked for once."""
        rest = [one for one in asked if one.name not in self._said]
        self._said |= asyncio.run(soak.answers(self._url, rest, {}))
        return {one.name: self._said[one.name] for one in asked}


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    with live_server(flags_of(folder), None) as live:
        yield Plain(live.url)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(half(1), id="half"),
        pytest.param([*cases()], id="all", marks=pytest.mark.slow),
    ],
)
def test_each_body_of_the_protocol_is_answered_as_without_drafts(
    asked: list[Case], served: Served, plain: Plain
) -> None:
    """By front ends and an engine in processes of their own, to which no field may be lost. The
    other half is that of tests/protocol/test_speculation.py."""
    expected = plain([soak.Body(one.name, one.path, one.body) for one in asked])
    assert_drafts_change_nothing(expected, asyncio.run(ask(served.url, asked)))
    for path in MODELS:
        (body,) = [one for one in soak.bodies() if one.name == f"model {path}"]
        ((name, answer),) = soak.answers_without_drafts(served, [body]).items()
        assert num_accepted(answer) == 0, path
        assert_same(settled(expected[name]), settled(answer), name)


def test_mixed_requests_answer_as_without_drafts(served: Served, plain: Plain) -> None:
    outcome = soak.soak(served, plain(soaked()), 48, warm_up=0)
    assert outcome.problems() == []
    assert outcome.num_cancelled > 5
    assert outcome.num_drafted_for > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_requests(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with serving(tmp_path, *attack.FLAGS) as served:
        outcome = attack.attack(served, 10_000)
    assert outcome.problems() == []
    assert "schemathesis" in outcome.statuses


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak_of_ten_thousand_requests(tmp_path: Path) -> None:
    expected = soak.plain_answers(tmp_path)
    with serving(tmp_path, *soak.flags(tmp_path), *soak.DRAFTS) as served:
        outcome = soak.soak(served, expected, 10_000)
    assert outcome.problems() == []
    assert outcome.growth <= GROWTH


@pytest.mark.parametrize(
    ("status", "text", "may_be"),
    [
        (200, "", True),
        (400, '{"error": {}}', True),
        (400, "Bad Request", False),
        (500, '{"error": {}}', False),
        (501, '{"error": {}}', True),
        (503, '{"error":{"code":"queue_full"}}', True),
        (503, '{"error":{"code":"stopped"}}', False),
    ],
)
def test_what_an_answer_may_be(status: int, text: str, may_be: bool) -> None:
    assert (attack.verdict(status, text) is None) == may_be


def test_what_is_lost_shows() -> None:
    before = Holdings({"engine": 100.0}, {}, (1, 2), 5)
    after = Holdings({"engine": 120.0}, {}, (1, 3), 5)
    probes = Probes([{"seconds": 0.7, "starved": 0.1, "status": 200}])
    probes.rows.append({"seconds": 0.7, "starved": 0.3, "status": 503})
    outcome = attack.Outcome(before=before, after=after, probes=probes, used_slots=3, restarted=1)
    outcome.note("x", "500", "500: oh")
    assert len(outcome.problems()) == 7
    outcome.slots_amid_stream = 9
    assert len(outcome.problems()) == 6


def test_mutations_are_many_and_the_same_for_a_seed() -> None:
    first, again = Mutations(3), Mutations(3)
    made = [first.next() for _ in range(200)]
    assert made == [again.next() for _ in range(200)]
    assert len({one.body for one in made}) > 180
    assert GRAMMARS.keys() <= {one.name for one in known()}
