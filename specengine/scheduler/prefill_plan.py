"""The prompt tokens of one forward, while they are being shared out."""

from __future__ import annotations

from dataclasses import dataclass, field

from specengine.core.request import Req, ReqState
from specengine.scheduler.kept_memory import Kept

# Tokens in common past the cache that make it worth waiting a forward for a cache hit.
SHARED_PREFIX = 64

Head = tuple[int, tuple[int, ...]]  # tokens that came from the cache, the SHARED_PREFIX behind them


@dataclass
class PrefillPlan:
    """left: tokens that the forward may still take. order: requests that may be admitted."""

    left: int
    order: list[Req]
    kept: Kept = field(default_factory=Kept)
    lengths: dict[Req, int] = field(default_factory=dict)
    heads: set[Head] = field(default_factory=set)  # of the prompts that are taken in
    blocked: Req | None = None  # it waits for memory: of those behind it, small ones are admitted
    num_tried: int = 0  # of those
    _num_started: int = 0  # of the order's first ones

    @property
    def first(self) -> Req | None:
        """The first that waits."""
        order, place = self.order, self._num_started
        while place < len(order) and order[place].state is not ReqState.WAITING:
            place += 1
        self._num_started = place
        return order[place] if place < len(order) else None

    def give_back(self, req: Req) -> None:
        """It was retracted, and waits again."""
        self.kept.remove(req)
        self._num_started = 0

    def take(self, req: Req, most: int) -> None:
        taken = self.lengths.get(req, 0)
        length = min(most, self.left, req.prefill_len - req.kv_len - taken)
        if length <= 0:
            return
        self.left -= length
        self.lengths[req] = taken + length
        self.note_head(req)

    def note_head(self, req: Req) -> None:
        if (head := head_of(req)) is not None:
            self.heads.add(head)


def head_of(req: Req) -> Head | None:
    """None where too little of the prompt is left to be worth sharing."""
    start, end = req.cached_len, req.cached_len + SHARED_PREFIX
    return (start, tuple(req.prompt_ids[start:end])) if end <= len(req.prompt_ids) else None
