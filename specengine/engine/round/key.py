"""What a device round is made for, what it is to do, and the record of one in flight."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from specengine.core.platform import Event
from specengine.core.request import Req
from specengine.engine.round.sampling import PLAIN, SamplingFeatures


class RoundKey(NamedTuple):
    """What a round is captured for. A tuple, because it is looked up several times a round."""

    batch_size: int
    num_steps: int
    sampling: SamplingFeatures = PLAIN  # what its requests ask for
    paused: bool = False  # the drafter does not observe
    num_nodes: int | None = None  # of trees that are cut to their best nodes, root included
    # As in RoundPlan. Deeper than the model drafts, None means its full depth.
    model_steps: int | None = None
    share: float | None = None  # of the SMs, that prompts beside it have (lanes.py)


class RoundPlan(NamedTuple):
    """What a round is to do for the requests of a batch."""

    levels: list[int]  # that each request drafts, at most the deepest round's num_steps
    paused: bool = False  # the drafter does not observe; then there are no drafts
    num_nodes: int | None = None  # of trees that are to be cut, root included
    drafted_nodes: list[int] | None = None  # nodes that lookup drafted, of each, without the root
    # Where lookup is used together with a model: how deep the model drafts for requests without a
    # match; 0 where each draft came from lookup, None where none did.
    model_steps: int | None = None
    from_lookup: list[bool] | None = None  # as in core.spec.DraftProposal


class Agreement(Protocol):
    """With ranks whose rounds must be of one shape (shared.py): at least as deep as the plan."""

    def agree(
        self, key: RoundKey, reqs: list[Req], plan: RoundPlan, in_flight: bool
    ) -> tuple[RoundKey, RoundPlan] | None:
        """What to launch in place of these. in_flight: whether this rank has a round that it has
        not collected; only then it may be None, and that round is to be collected first."""
        ...


# Of requests with a grammar, by index into the batch: the depths of the drafts that it leaves.
KeptDepths = dict[int, list[int]]


class InFlightRound(NamedTuple):
    """A round that was launched. What it decided is in `outcome` once `done` has passed."""

    reqs: list[Req]
    plan: RoundPlan
    # int64 [B, 2 * num_steps + 3], pinned: accepted drafts, the target's tokens, and of trees the
    # nodes that they are at; under a stochastic rule the number of nodes, without the root
    outcome: Tensor
    done: Event
    key: RoundKey
    turn: int  # which half of the buffers the host reads
    kept_depths: KeptDepths  # filled in when token masks are sent

    def kept(self, counts: list[int], levels: list[int]) -> list[int]:
        """How many drafts of each request grammars leave. counts, levels: drafts and levels of
        each."""
        depths = self.kept_depths
        if not depths:
            return counts
        return [
            min(count, sum(depth <= level for depth in depths[i])) if i in depths else count
            for i, (count, level) in enumerate(zip(counts, levels, strict=True))
        ]
