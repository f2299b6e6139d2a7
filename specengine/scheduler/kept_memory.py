"""The KV memory that admission keeps free for requests that hold some already."""

from __future__ import annotations

from specengine.core.request import Req

Rank = tuple[int, int]


class Kept:
    """Slots to keep free for the live requests: for those that go before the one that asks, as the
    others are retracted before it is."""

    def __init__(self) -> None:
        self._needs: list[tuple[Rank, int]] = []
        self._total = 0
        self._last: Rank | None = None

    def add(self, req: Req, slots: int) -> None:
        rank = req.rank
        self._needs.append((rank, slots))
        self._total += slots
        self._last = rank if self._last is None else max(self._last, rank)

    def before(self, req: Req) -> int:
        rank = req.rank
        if self._last is None or self._last <= rank:
            return self._total  # nearly always
        return sum(slots for other, slots in self._needs if other <= rank)
