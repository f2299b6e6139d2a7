"""What the target and the drafter hold of each drafted node of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.kernels.accept.accept_rejection_ref import accept_chance, residual
from specengine.kernels.accept.accept_sibling_ref import Contest
from specengine.layers.logits import row_chunks
from specengine.target.verify.probs import RoundProbs

_NAN = float("nan")


@dataclass(frozen=True)
class NodeWeights:
    """float32 [B, N] on the host; NaN where not known, as of roots.

    target_prob: the target's probability of the node's token after its parent, as the request
    samples; of greedy requests the model's own, at temperature 1. path_prob: the drafter's estimate
    that the whole path is accepted. draft_prob: what the token was drawn with, before its siblings
    were taken out. chance: that it is accepted once the siblings before it are rejected (recursive
    rejection; on chains that of token-level rejection). missing: block verification's S after the
    node, the mass of relu(p * target - draft) with the draft that its first child was drawn from.
    """

    target_prob: Tensor
    path_prob: Tensor
    draft_prob: Tensor
    chance: Tensor
    missing: Tensor


@torch.inference_mode()
def weigh(proposal: DraftProposal, output: LogitsOutput, sampling: SamplingBatch) -> NodeWeights:
    unknown = torch.full(proposal.tokens.shape, _NAN)
    path = unknown if proposal.confidence is None else proposal.confidence.float().cpu()
    target = _model_probs(output.logits, proposal).cpu()
    if sampling.random is None:
        return NodeWeights(target, path, unknown, unknown, unknown)
    probs = RoundProbs.of(output.logits, sampling, proposal)
    greedy_B1 = probs.greedy_B[:, None].cpu()
    own = greedy_B1 | target.isnan()
    target = torch.where(own, target, probs.target_of_tokens().float().cpu())
    if probs.draft_BNV is None:
        return NodeWeights(target, path, unknown, unknown, unknown)
    draft = probs.draft_of_tokens().float().cpu().masked_fill(greedy_B1, _NAN)
    chance, missing = unknown.clone(), unknown.clone()
    for request in (~probs.greedy_B).nonzero().flatten().tolist():
        tree = _SampledTree(probs, request, proposal.num_nodes[request])
        tree.judge(chance[request], missing[request])
    return NodeWeights(target, path, draft, chance, missing)


def _model_probs(logits_TV: Tensor, proposal: DraftProposal) -> Tensor:
    """float32 [B, N], the softmax at temperature 1 of each node's token after its parent."""
    device, (batch_size, width) = logits_TV.device, proposal.tokens.shape
    counts = torch.tensor(proposal.num_nodes)
    roots_B1 = (counts.cumsum(0) - counts)[:, None].to(device)
    exists_BN = (torch.arange(width) < counts[:, None]).to(device)
    exists_BN[:, 0] = False
    rows = (roots_B1 + proposal.parents.to(device))[exists_BN]
    tokens = proposal.tokens.to(device)[exists_BN]
    parts = [logits_TV[chunk].float().logsumexp(-1) for chunk in row_chunks(*logits_TV.shape)]
    logs = logits_TV[rows, tokens].float() - torch.cat(parts)[rows]
    found = torch.full((batch_size, width), _NAN, device=device)
    return found.masked_scatter_(exists_BN, logs.exp())


class _SampledTree:
    """The drafts of one request, one node after the other: [1, V] rows throughout."""

    def __init__(self, probs: RoundProbs, request: int, num_nodes: int) -> None:
        self.target_NV = probs.target_TV[int(probs.roots_B[request]) :][:num_nodes]
        assert probs.draft_BNV is not None
        self.draft_NV = probs.draft_BNV[request]
        self.tokens = probs.tokens_BN[request, :num_nodes].tolist()
        self.parents = probs.parents_BN[request, :num_nodes].tolist()

    def judge(self, chance_N: Tensor, missing_N: Tensor) -> None:
        """Fill in the chance of each node, and what is missing after each that has children."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.tokens)):
            children.setdefault(self.parents[node], []).append(node)
        path = {0: 1.0}  # block verification's p
        for parent, below in children.items():
            target_1V = _row(self.target_NV, parent)
            first_1V = _row(self.draft_NV, below[0])
            missing_N[parent] = residual(path[parent] * target_1V, first_1V).sum()
            contest = Contest(target_1V)
            for child in below:
                token, draft_1V = self.tokens[child], _row(self.draft_NV, child)
                pair = torch.stack([path[parent] * target_1V[0, token], draft_1V[0, token]])
                path[child] = float(accept_chance(pair[0], pair[1]))
                left_1V = contest.draft(draft_1V)
                chances = accept_chance(contest.target_BV[:, token], left_1V[:, token])
                chance_N[child] = float(chances)
                where = torch.ones_like(chances, dtype=torch.bool)
                contest.reject(left_1V, torch.full_like(where, token, dtype=torch.int64), where)


def _row(weights_NV: Tensor, node: int) -> Tensor:
    """float64 [1, V], of a sum of 1."""
    row_1V = weights_NV[node : node + 1].double()
    return row_1V / row_1V.sum(-1, keepdim=True)
