"""Which cards the ranks of an engine have."""

from __future__ import annotations

import pytest

from specengine.server.processes.engines import CARDS, cards_of


@pytest.mark.parametrize(
    ("given", "tp_size", "found"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("3", 1, ["3", "3"]),
    ],
)
def test_each_engine_has_cards_of_its_own(
    given: str | None, tp_size: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CARDS, raising=False)
    if given is not None:
        monkeypatch.setenv(CARDS, given)
    assert [cards_of(number, tp_size) for number in range(2)] == found
