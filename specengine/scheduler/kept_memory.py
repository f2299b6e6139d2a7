"""The KV memory that admission keeps free for requests that hold some already."""

from __future__ import annotations

from specengine.core.request import Req

Rank = tuple[int, int]


class Kept:
    """Slots to keep free for the live requests: for those that go before the one that asks, as the
    others are retracted before it is."""

    def __init__(self) -> None:
        self._needs: dict[Req, int] = {}
        self._total = 0
        self._last: Rank | None = None  # the highest ever added
        self._firsts: dict[str, tuple[Rank, int]] = {}  # of each owner
        self._of_firsts = 0

    def add(self, req: Req, slots: int) -> None:
        rank = req.rank
        self._needs[req] = slots
        self._total += slots
        self._last = rank if self._last is None else max(self._last, rank)
        first = self._firsts.get(req.owner)
        if first is None or rank < first[0]:
            self._firsts[req.owner] = rank, slots
            self._of_firsts += slots - (0 if first is None else first[1])

    def remove(self, req: Req) -> None:
        """A choice that has others of its owner before it was retracted."""
        self._total -= self._needs.pop(req, 0)

    def before(self, req: Req) -> int:
        rank = req.rank
        if self._last is None or self._last <= rank:
            return self._total  # nearly always
        return sum(slots for other, slots in self._needs.items() if other.rank <= rank)

    def of_firsts(self) -> int:
        """For the first choice of an owner that is not served, to which all but the first choices
        of other owners give way."""
        return self._of_firsts
