"""The target's and the drafter's probabilities in one round, read where a rule asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.kernels.accept.types import SampledRound, row_sums
from specengine.layers.logits import RowMap, target_weights
from specengine.target.verify.rows import edited_by_chunks, row_map
from specengine.target.verify.tree import ancestor_mask, depths, node_mask


@dataclass(frozen=True)
class RoundProbs(SampledRound):
    """As rules read them; made from the target's logits and a proposal."""

    mask_BNN: Tensor  # bool, ancestors and self

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
            target_sum_T=row_sums(weights_TV),
            draft_BNV=None if draft is None else draft.to(device, non_blocking=True),
            tokens_BN=proposal.tokens.to(device, non_blocking=True).where(exists, 0),
            parents_BN=parents.where(exists, 0).clamp(min=0),
            exists_BN=exists,
            mask_BNN=mask,
            depths_BN=depths(mask),
            roots_B=roots.to(device, non_blocking=True),
            greedy_B=sampling.random.greedy,
        )


def _target_weights(logits_TV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    """The weights that plain decoding samples from; all on the best token for greedy requests."""

    def weights(edited_RV: Tensor, part: RowMap) -> Tensor:
        return _chunk_weights(edited_RV, sampling, part)

    return edited_by_chunks(logits_TV, sampling, rows, weights)


def _chunk_weights(logits_RV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    assert sampling.random is not None
    weights_RV = target_weights(logits_RV, sampling.random, rows)
    if not sampling.random.any_greedy:
        return weights_RV
    best_R1 = logits_RV.argmax(-1, keepdim=True)
    one_hot_RV = torch.zeros_like(weights_RV).scatter_(1, best_R1, 1.0)
    return torch.where(rows.per_row(sampling.random.greedy)[:, None], one_hot_RV, weights_RV)
