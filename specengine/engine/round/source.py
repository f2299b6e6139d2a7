"""The interface of the source of drafts of rounds on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specengine.core.draft_picks import DraftEdits, DraftPicks, TreeDraws
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal
from specengine.engine.round.draws import DraftWeights
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.kinds import Variants
from specengine.kernels.tree.types import DraftTree, TreeLimits


@dataclass(frozen=True)
class DraftOptions:
    """How the drafts of one round are chosen; None throughout: the best tokens.

    picks: of chains. edits, limits, draws: of trees. weights: what `picks` or `draws` draw from,
    where the rule needs that; lookup_weights: the same, of rounds in which all drafts came from
    lookup.
    """

    picks: DraftPicks | None = None
    edits: DraftEdits | None = None
    limits: TreeLimits | None = None
    draws: TreeDraws | None = None
    weights: DraftWeights | None = None
    lookup_weights: DraftWeights | None = None


@dataclass(frozen=True)
class Drafts:
    """The drafts of the requests in `rows`: chains, or trees of N nodes each."""

    rows: RowBatch
    tokens_BK: Tensor  # int64, the drafts without the root
    tree: DraftTree | None = None
    weights: DraftWeights | None = None
    numbers_BN: Tensor | None = None  # int64, as in SampledRound; of trees that a grammar cut
    host_copy: Tensor | None = None  # what the host must know of them, where a grammar asks

    @classmethod
    def of_tree(
        cls, rows: RowBatch, tree: DraftTree, weights: DraftWeights | None = None
    ) -> Drafts:
        return cls(rows, tree.tokens_BN[:, 1:], tree, weights)


class Source(ABC):
    """Drafts for the rounds of one engine; what is not overridden is so for drafts of one kind.

    `draft` and `observe` run inside captures: they may not wait for the device, nor branch on
    values that lie there. All other methods run on the host, and give numbers of the host.
    """

    host_drafts = True  # before each round that has drafts, from text
    is_tree: bool
    max_steps: int  # levels of the deepest round
    draft_slots = 0  # KV slots past the kept tokens that drafting writes
    model_steps = 0  # levels of a model's deepest draft; 0 where no model drafts
    model_is_tree = False
    tree_topk = 1  # children of a node of the model's trees; 1 of chains
    emits_probs = False  # as in Drafter: drafts of requests that sample are sampled
    may_be_unready = False  # is_ready may be False

    def is_ready(self, req: Req) -> bool:
        """Whether the drafter has seen enough of a request for rounds on the device. Once true, it
        stays so."""
        return True

    def mark_stale(self, rows: Tensor, lens: Tensor) -> None:
        """Before a paused drafter observes again: of the requests in these rows of the page table,
        int64 [R], it has not observed what lies before lens, int64 [R]. From then on it drafts from
        what it observes behind that alone."""
        raise NotImplementedError

    @abstractmethod
    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts: ...

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        """Take in what the round decided. output: a row a node. tokens: int64 [B, num_steps + 1],
        the target's token at each node of a chain, or of the accepted path; accepted[b] + 1 of them
        were emitted."""
        return

    @abstractmethod
    def num_nodes(self, num_steps: int) -> int:
        """Nodes of the largest tree so deep, root included."""

    def tree_sizes(self, num_steps: int) -> set[int]:
        """Nodes of all trees that rounds so deep may have, root included."""
        return {self.num_nodes(num_steps)}

    @abstractmethod
    def model_depth(self, key: RoundKey) -> int:
        """How deep a model drafts in such rounds."""

    def drawn_nodes(self, key: RoundKey) -> int:
        """Nodes of each request for which weights are kept where a model samples chains."""
        return 1 + key.num_steps

    @abstractmethod
    def counts_are_sent(self, key: RoundKey) -> bool:
        """Whether the host sends how many drafts each request has."""

    @abstractmethod
    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        """Drafts of lookup to the device, in the order of the round's requests -> the plan of that
        round. levels: how deep each request may draft. The proposal may change afterwards."""

    def pretend(self, batch_size: int, vocab_size: int) -> None:
        """For a round that is timed: the first requests have drafts that differ, as far as they are
        not made in the round. The next `send` takes their place."""
        return

    def variants(self, steps: list[int]) -> Variants:
        """num_steps and model_steps of further keys, beside (k, None) of each number of steps."""
        return []

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        """The key of the round that serves a plan. key: without regard to the source."""
        return key

    @abstractmethod
    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        """Nodes of each tree, without the root, where requests drafted so many levels."""


def round_slots(source: Source) -> int:
    """KV slots past the kept tokens that a round writes, of each request."""
    if not source.is_tree:
        return source.max_steps + 1
    return max(source.num_nodes(source.max_steps), source.draft_slots)
