"""Drafts of text for the round after one that has landed, made before that one is committed."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.core.request import Req
from specengine.core.spec import AheadDrafter, DraftProposal, TextTreeDrafter
from specengine.engine.draft_depth import cut_to_depth, depth_within
from specengine.scheduler.scheduler import Scheduler


class TextAhead:
    """Committing takes the host as long as drafting does, or longer. So the next round of the
    requests that go on is launched first, and the last one is committed while it flies. Whether a
    request goes on is seen at a glance: one that ends by a stop string or a grammar flies for
    nothing."""

    def __init__(self, drafter: AheadDrafter, scheduler: Scheduler, cuts: bool = False) -> None:
        """cuts: less than all is asked for by cutting, as in rounds of the host, where a verifier
        makes of other drafts other tokens. What is drafted for less room may promise more."""
        self.drafter = drafter
        self.scheduler = scheduler
        is_tree = isinstance(drafter, TextTreeDrafter) and drafter.proposes_tree
        self._cuts = cuts or is_tree
        self._going: dict[Req, tuple[list[int], int]] = {}  # what each has said, and has left

    def follow(self, reqs: Sequence[Req], said: Sequence[list[int]], slots: int) -> list[Req]:
        """Of the requests of a round, those to fly another. said: in the round."""
        left_after = self.scheduler.policy.left_after(reqs, said)
        self._going = {
            req: (new, left)
            for req, new, left in zip(reqs, said, left_after, strict=True)
            if left > 0 and not (req.end_ids and _ends(req, new))
        }
        return self.scheduler.follow([*self._going], slots)

    def draft(self, reqs: Sequence[Req], depth: int) -> DraftProposal:
        """For those that follow."""
        given = [self._going[req] for req in reqs]
        levels = [depth_within(req, depth) for req in reqs]
        most = [min(left, self.drafter.max_nodes) for _, left in given]
        if not self._cuts:
            most = [min(count, 1 + limit) for count, limit in zip(most, levels, strict=True)]
        proposal = self.drafter.draft_ahead(reqs, [new for new, _ in given], most)
        return cut_to_depth(proposal, levels) if self._cuts else proposal

    def forget(self) -> None:
        """What was said may not be committed: texts are to be read again."""
        for req in self._going:
            self.drafter.release(req)
        self._going = {}


def _ends(req: Req, new: Sequence[int]) -> bool:
    """Whether one of the tokens ends it. Whoever goes on must not be left out of a flight."""
    return len(req.output_ids) >= req.sampling.min_tokens and not req.end_ids.isdisjoint(new)
