"""What rules of acceptance read, decide, and move on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundState:
    """What rounds start from, by row of the page table, and where they leave what they decide.

    Rounds take turns with the two halves of `outcomes`, so that the host can read one while the
    other is written. Row 0 of the page table pads; its state means nothing.
    """

    lens: Tensor  # int64 [num_rows], tokens whose KV is kept
    roots: Tensor  # int64 [num_rows], the last token
    # int64 [num_rows], drafts that a round may accept, even if all are right: the request's own
    # limit of depth (core.sampling.SpecControl)
    max_accepted: Tensor
    turn: Tensor  # int64 [1], which half of outcomes is this round's
    # int64 [2, B, at least 2 * K + 3], in memory of the host, pinned where it serves a CUDA device,
    # which writes to it: accepted, the target's tokens at K + 1 nodes, of trees the K nodes below
    # the root, and how many drafts there were where the host cannot know that (accept_path)
    outcomes: Tensor

    @classmethod
    def of(cls, num_rows: int, batch_size: int, num_steps: int, device: torch.device) -> RoundState:
        lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        outcomes = torch.zeros(2, batch_size, 2 * num_steps + 3, dtype=torch.int64)
        return cls(
            lens,
            torch.zeros_like(lens),
            torch.full_like(lens, num_steps),
            torch.zeros(1, dtype=torch.int64, device=device),
            outcomes.pin_memory() if device.type == "cuda" else outcomes,
        )


@dataclass(frozen=True)
class Simulated:
    """Accepts `whole` drafts, and with a chance of `part` one more, whatever was chosen."""

    whole: int
    part: float

    @classmethod
    def of(cls, length: float | None) -> Simulated | None:
        """An accepted length, bonus token included; None forces nothing."""
        return None if length is None else cls(int(length) - 1, length % 1.0)


@dataclass(frozen=True)
class AcceptedPaths:
    """W nodes of each request, the root first; past the accepted ones it is the root again. Of
    chains, whose paths have all nodes in order, without nodes_BW and rows_T."""

    accepted_B: Tensor  # int64, accepted nodes below the root
    tokens_BW: Tensor  # int64, the target's token at each; accepted[b] + 1 of them are emitted
    nodes_BW: Tensor | None = None  # int64, index among the request's nodes
    rows_T: Tensor | None = None  # int64 [B * W], index among all nodes of the batch


@dataclass(frozen=True)
class SampledRound:
    """The target's and the drafter's probabilities in one round.

    Rows of the target follow a node: they are what plain decoding would sample from after it.
    Rows of the draft lead to a node. A greedy request has a target of one token, and a draft of
    none: what its draft says is not read.

    Nodes that do not exist have token 0, parent 0 and depth -1. Parents come before children; in
    a chain node i is the child of node i - 1. Coins are keyed by a node's number, which is its
    place unless `numbers_BN` says otherwise.
    """

    target_TV: Tensor  # weights of the rows of nodes that exist; float32 outside of proofs
    target_sum_T: Tensor  # float64
    draft_BNV: Tensor | None  # weights, float32 outside of proofs
    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, 0 for the root as well
    exists_BN: Tensor  # bool
    depths_BN: Tensor  # int64
    roots_B: Tensor  # int64, row of each root
    greedy_B: Tensor  # bool
    # int64, read of nodes that exist: among them alone, of trees. Chains have none.
    numbers_BN: Tensor | None = field(default=None, kw_only=True)

    def weights(self, nodes_B: Tensor) -> Tensor:
        """[B, V], the target after one node of each request, as plain decoding weighs it."""
        return self.target_TV[self.roots_B + nodes_B]

    def target(self, nodes_B: Tensor) -> Tensor:
        """float64 [B, V], the target after one node of each request."""
        rows_B = self.roots_B + nodes_B
        return self.target_TV[rows_B].double() / self.target_sum_T[rows_B, None]

    def draft(self, nodes_B: Tensor) -> Tensor:
        """float64 [B, V], what the token of one node of each request was drawn from. Meaningless
        where the node does not exist."""
        assert self.draft_BNV is not None
        requests = torch.arange(len(nodes_B), device=nodes_B.device)
        probs = self.draft_BNV[requests, nodes_B].double()
        probs = probs / probs.sum(-1, keepdim=True)
        return probs.masked_fill(self.greedy_B[:, None], 0.0)

    def target_of_tokens(self) -> Tensor:
        """float64 [B, N]: the target's probability of each node's token after its parent; 0 where a
        node does not exist, and meaningless for roots."""
        rows_BN = self.roots_B[:, None] + self.parents_BN
        weights = self.target_TV[rows_BN, self.tokens_BN].double() / self.target_sum_T[rows_BN]
        return weights.where(self.exists_BN, 0.0)

    def draft_of_tokens(self) -> Tensor:
        """float64 [B, N]: the probability that each node's token was drawn with, before siblings
        were taken out; meaningless where a node does not exist, and for roots."""
        assert self.draft_BNV is not None
        weights_BN = self.draft_BNV.gather(2, self.tokens_BN[:, :, None]).squeeze(2).double()
        probs_BN = weights_BN / row_sums(self.draft_BNV)
        return probs_BN.masked_fill(self.greedy_B[:, None], 0.0)

    def children(self, nodes_B: Tensor) -> Tensor:
        """bool [B, N], the children of one node of each request."""
        below = self.exists_BN & (self.depths_BN > 0)
        return below & (self.parents_BN == nodes_B[:, None])

    def nodes(self) -> Tensor:
        """int64 [B, N], the index of each node."""
        width = self.tokens_BN.shape[1]
        return torch.arange(width, device=self.tokens_BN.device).expand_as(self.tokens_BN)


@dataclass(frozen=True)
class Draws:
    """What the round's uniforms are keyed by (`keyed_uniform`): a request's seed, the output
    position that is decided, and a stream for each purpose."""

    seeds_B: Tensor  # int64
    positions_B: Tensor  # int64, what the root's children decide
    accept: int  # stream of the coins, one a node
    residual: int  # stream of tokens in place of rejected ones
    sample: int  # stream of tokens where nothing was drafted


@dataclass(frozen=True)
class Accepted:
    """Where the accepted path of each request ends, and the token after it."""

    ends_B: Tensor  # int64, nodes
    tokens_B: Tensor  # int64


def row_sums(weights: Tensor) -> Tensor:
    """float64, over the last dimension."""
    return weights.sum(-1, dtype=torch.float64)


@dataclass(frozen=True)
class RelaxedRound:
    """Drafts of one round, and what the target says after each node.

    The rows of a request's nodes lie together, from its root's on. Of nodes that do not exist
    tokens and parents are not read. Parents come before children; the root's is not read. A node
    among those that exist whose token and parent are -1 is no node's child, as if it did not exist.
    """

    logits_TV: Tensor  # floating, before temperature; -inf where a token is forbidden, no NaN
    chosen_T: Tensor  # int64, the target's token after each node
    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64
    counts_B: Tensor  # int64, nodes that exist, root included
    roots_B: Tensor  # int64, row of each root
