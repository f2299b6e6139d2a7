"""What a drafter of text reads while the host would wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specengine.core.request import Req
from specengine.core.spec import TextDrafter

_ROUNDS = 8  # until all requests have had their turn
_MOST = 32  # tokens a turn: what was missed is made up for, and a turn is over soon


class TextStudy:
    """While plain decoding stands, a drafter of text is not asked, and all that was committed would
    be left for the round in which drafts are tried again. So requests take turns at being read
    while the device flies.

    A turn takes in the tokens of several rounds, which costs half as much as one by one: the wait
    is also when other threads run.
    """

    def __init__(self, drafter: TextDrafter) -> None:
        self.drafter = drafter
        self._turn = 0  # of the requests, in their order

    def go_on(self, reqs: Sequence[Req], has_landed: Callable[[], bool]) -> None:
        """As long as that says no: a host that comes late studies nothing."""
        for _ in range(-(-len(reqs) // _ROUNDS)):
            if has_landed():
                return
            self._turn = (self._turn + 1) % len(reqs)
            self.drafter.study(reqs[self._turn], _MOST)
