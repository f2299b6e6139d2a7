"""Work of a lookup drafter that is done while the device runs a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specengine.core.drafter import Drafter
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.engine.draft_depth import cut_to_depth
from specengine.scheduler.scheduler import Scheduler

_ROUNDS = 8  # until all requests have had their turn
_MOST = 32  # tokens a turn: what was missed is made up for, and a turn is over soon


class LookupPrefetch:
    """Drafts for the round after one that is collected, made before that one is committed.

    Committing takes the host as long as drafting does, or longer. So the next round of the requests
    that go on is launched first, and the last one is committed while the device runs it. Whether a
    request goes on is checked cheaply: a request that ends by a stop string or a grammar takes part
    in the next round for nothing."""

    def __init__(self, drafter: Drafter, scheduler: Scheduler, cuts: bool = False) -> None:
        """cuts: drafts are made as long as they can be and then cut, as in rounds of the host: a
        verifier makes other tokens of other drafts, and a draft made for fewer tokens may be
        another."""
        self.drafter = drafter
        self.scheduler = scheduler
        self._cuts = cuts or drafter.proposes_tree
        self._going: dict[Req, tuple[list[int], int]] = {}  # tokens emitted and tokens left

    def follow(self, reqs: Sequence[Req], emitted: Sequence[list[int]], slots: int) -> list[Req]:
        """The requests of a round that another is launched for. emitted: tokens of that round."""
        left_after = self.scheduler.policy.left_after(reqs, emitted)
        self._going = {
            req: (new, left)
            for req, new, left in zip(reqs, emitted, left_after, strict=True)
            if left > 0 and not (req.end_ids and _ends(req, new))
        }
        return self.scheduler.follow([*self._going], slots)

    def draft(self, reqs: Sequence[Req], levels: Sequence[int]) -> DraftProposal:
        """For those that follow. levels: how deep each may draft."""
        given, max_nodes = [self._going[req] for req in reqs], self.drafter.max_nodes
        most = [min(left, max_nodes) for _, left in given]
        if not self._cuts:
            most = [min(count, 1 + limit) for count, limit in zip(most, levels, strict=True)]
        proposal = self.drafter.draft_ahead(reqs, [new for new, _ in given], most)
        return cut_to_depth(proposal, levels) if self._cuts else proposal

    def forget(self) -> None:
        """The emitted tokens may not be committed: their texts must be read again."""
        for req in self._going:
            self.drafter.release(req)
        self._going = {}


def _ends(req: Req, new: Sequence[int]) -> bool:
    """Whether one of the tokens ends it. A request that goes on must not be left out."""
    return len(req.output_ids) >= req.sampling.min_tokens and not req.end_ids.isdisjoint(new)


class IndexAhead:
    """Reads texts while the host would wait.

    While there are no drafts, a lookup drafter is not called, and all that was committed would be
    left for the round in which drafts are tried again. So requests take turns at being read while
    the device runs. A turn takes in the tokens of several rounds, which costs half as much as one
    by one: the wait is also when other threads run.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._turn = 0  # of the requests, in their order

    def advance(self, reqs: Sequence[Req], is_done: Callable[[], bool]) -> None:
        """Until the round is done: a host that comes late reads nothing."""
        for _ in range(-(-len(reqs) // _ROUNDS)):
            if is_done():
                return
            self._turn = (self._turn + 1) % len(reqs)
            self.drafter.index_ahead(reqs[self._turn], _MOST)
