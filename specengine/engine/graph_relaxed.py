"""Rounds in which drafts stand that are nearly as good as the target's own token, as one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.spec import VerifyResult
from specengine.engine.graph_ruled import Drafted
from specengine.engine.graph_weighed import GraphWeighedRound, WeighingRound
from specengine.engine.graph_weighed_tree import DraftedTree, GraphWeighedTreeRound
from specengine.engine.round_form import Flight, Form
from specengine.kernels.accept_relaxed import RelaxedRound
from specengine.kernels.accept_sampled import Accepted
from specengine.target.verify.relaxed import RelaxedVerifier


class RelaxedRounds(WeighingRound):
    """A WeighingRound that is lossy, and weighs what greedy requests have drafted, too: drafts are
    held against the target's edited logits, and its tokens are those of plain decoding."""

    verifier: RelaxedVerifier

    def __init__(self, verifier: RelaxedVerifier, draws: bool, *given: Any) -> None:
        """As WeighingRound."""
        super().__init__(verifier, draws, *given)
        self.choices.weighs_greedy = True

    def chosen(self, logits_TV: Tensor, rows: RowBatch, batch: ForwardBatch) -> Tensor:
        """int64 [T], the target's tokens. The logits stay, for drafts are held against them."""
        return self.choices.tokens(logits_TV, rows, batch, in_place=False)

    def land(self, flight: Flight) -> VerifyResult:
        result = super().land(flight)
        result.is_lossy = True
        return result


class GraphRelaxedRound(RelaxedRounds, GraphWeighedRound):
    """Of chains."""

    def found(
        self, drafted: Drafted, logits_TV: Tensor, batch: ForwardBatch, form: Form
    ) -> Accepted:
        rows, chain = drafted.rows, self.chain_of(drafted.drafts_BK)
        drafts = RelaxedRound(
            logits_TV=logits_TV,
            chosen_T=self.chosen(logits_TV, rows, batch),
            tokens_BN=torch.cat([rows.roots_B[:, None], drafted.drafts_BK], dim=1),
            parents_BN=chain.parents_BN,
            counts_B=self.levels(rows, form) + 1,
            roots_B=chain.roots_B,
        )
        return self.verifier.decide(drafts)


class GraphRelaxedTreeRound(RelaxedRounds, GraphWeighedTreeRound):
    """Of trees. What is missing from one, wherever it lies, is nobody's child."""

    def __init__(self, verifier: RelaxedVerifier, draws: bool, *given: Any) -> None:
        """As WeighingRound."""
        super().__init__(verifier, draws, *given)
        # Made before any capture, in which they would be nodes of the graph.
        self.counts_B = {n: torch.full_like(roots_B, n) for n, roots_B in self.roots_B.items()}

    def found(self, drafted: DraftedTree, logits_TV: Tensor, batch: ForwardBatch) -> Accepted:
        tree = drafted.tree
        batch_size, num_nodes = tree.tokens_BN.shape
        lacks_BN = tree.parents_BN == self.nodes_N[num_nodes]
        drafts = RelaxedRound(
            logits_TV=logits_TV,
            chosen_T=self.chosen(logits_TV, drafted.rows, batch),
            tokens_BN=tree.tokens_BN.masked_fill(lacks_BN, -1),
            parents_BN=tree.parents_BN.masked_fill(lacks_BN, -1),
            counts_B=self.counts_B[num_nodes][:batch_size],
            roots_B=self.roots_B[num_nodes][:batch_size],
        )
        return self.verifier.decide(drafts)
