"""The target's and the drafter's probabilities in one round, read where a rule asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.layers.logits import RowMap, edit_logits, row_chunks, target_weights
from specengine.target.verify.rows import row_map
from specengine.target.verify.tree import ancestor_mask, depths, node_mask


@dataclass(frozen=True)
class RoundProbs:
    """Rows of the target follow a node: they are what plain decoding would sample from after it.
    Rows of the draft lead to a node. A greedy request has a target of one token, and a draft of
    none: what its draft says is not read.

    Nodes that do not exist have token 0, parent 0 and depth -1.
    """

    target_TV: Tensor  # weights of the rows of nodes that exist; float32 outside of proofs
    target_sum_T: Tensor  # float64
    draft_BNV: Tensor | None
    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, 0 for the root as well
    exists_BN: Tensor  # bool
    mask_BNN: Tensor  # bool, ancestors and self
    depths_BN: Tensor  # int64
    roots_B: Tensor  # int64, row of each root
    greedy_B: Tensor  # bool

    @classmethod
    def of(cls, logits_TV: Tensor, sampling: SamplingBatch, proposal: DraftProposal) -> RoundProbs:
        assert sampling.random is not None
        device, width = logits_TV.device, proposal.tokens.shape[1]
        weights_TV = _target_weights(logits_TV, sampling, row_map(proposal, sampling))
        exists = node_mask(proposal.num_nodes, width, device)
        parents = proposal.parents.to(device, non_blocking=True)
        mask = ancestor_mask(parents, exists)
        roots = torch.tensor([0, *accumulate(proposal.num_nodes[:-1])])
        draft = proposal.draft_probs
        return cls(
            target_TV=weights_TV,
            target_sum_T=_row_sums(weights_TV),
            draft_BNV=None if draft is None else draft.to(device, non_blocking=True),
            tokens_BN=proposal.tokens.to(device, non_blocking=True).where(exists, 0),
            parents_BN=parents.where(exists, 0).clamp(min=0),
            exists_BN=exists,
            mask_BNN=mask,
            depths_BN=depths(mask),
            roots_B=roots.to(device, non_blocking=True),
            greedy_B=sampling.random.greedy,
        )

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
        probs_BN = weights_BN / _row_sums(self.draft_BNV)
        return probs_BN.masked_fill(self.greedy_B[:, None], 0.0)

    def children(self, nodes_B: Tensor) -> Tensor:
        """bool [B, N], the children of one node of each request."""
        below = self.exists_BN & (self.depths_BN > 0)
        return below & (self.parents_BN == nodes_B[:, None])

    def nodes(self) -> Tensor:
        """int64 [B, N], the index of each node."""
        width = self.tokens_BN.shape[1]
        return torch.arange(width, device=self.tokens_BN.device).expand_as(self.tokens_BN)


def _target_weights(logits_TV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    """The weights that plain decoding samples from; all on the best token for greedy requests."""
    parts = []
    for chunk in row_chunks(*logits_TV.shape):
        part = rows.part(chunk, len(logits_TV), logits_TV.device)
        parts.append(_chunk_weights(edit_logits(logits_TV[chunk], sampling, part), sampling, part))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _chunk_weights(logits_RV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    assert sampling.random is not None
    weights_RV = target_weights(logits_RV, sampling.random, rows)
    if not sampling.random.any_greedy:
        return weights_RV
    best_R1 = logits_RV.argmax(-1, keepdim=True)
    one_hot_RV = torch.zeros_like(weights_RV).scatter_(1, best_R1, 1.0)
    return torch.where(rows.per_row(sampling.random.greedy)[:, None], one_hot_RV, weights_RV)


def _row_sums(weights: Tensor) -> Tensor:
    """float64, over the last dimension."""
    return weights.sum(-1, dtype=torch.float64)
