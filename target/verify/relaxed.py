"""Lossy: drafts stand where they are nearly as good as the target's own token."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.layers.logits import RowMap, edit_logits, row_chunks
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.tree import flat_nodes
from specengine.target.verify.walk import Walk


class RelaxedVerifier(MatchVerifier):
    """Like MatchVerifier, but where no child carries the token that the target samples, the first
    child stands that is fair: not forbidden, among the target's top_k tokens, and with a
    probability, taken before temperature, at most `delta` below the best one's. The output is not
    the target's, and every result says so."""

    is_lossy = True
    follows_drafts = True

    def __init__(self, top_k: int, delta: float) -> None:
        super().__init__()
        self.top_k = top_k
        self.delta = delta

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        if proposal.is_empty:
            return super().walks(output, sampling, proposal)
        rows = row_map(proposal, sampling)
        sampled = self.sampler(output, sampling, rows).tolist()
        fair = self._fair(output.logits, sampling, rows, proposal).tolist()
        columns = (proposal.tokens.tolist(), proposal.parents.tolist(), proposal.num_nodes)
        walks, start = [], 0
        for tokens, parents, count in zip(*columns, strict=True):
            end = start + count
            walks.append(relaxed_walk(tokens, parents, sampled[start:end], fair[start:end]))
            start = end
        return walks

    def _fair(
        self, logits_TV: Tensor, sampling: SamplingBatch, rows: RowMap, proposal: DraftProposal
    ) -> Tensor:
        """bool [T, N]: after node t, the token of node n of the same request is fair."""
        width, device = proposal.tokens.shape[1], logits_TV.device
        request_T = flat_nodes(proposal.num_nodes, width).to(device) // width
        tokens_TN = proposal.tokens.to(device)[request_T].clamp(0, logits_TV.shape[1] - 1)
        fair = []
        for chunk in row_chunks(*logits_TV.shape):
            part = rows.part(chunk, len(logits_TV), device)
            probs_RV = edit_logits(logits_TV[chunk], sampling, part).softmax(-1)
            best_RK = probs_RV.topk(min(self.top_k, probs_RV.shape[1])).values
            floor_R1 = torch.maximum(best_RK[:, -1:], best_RK[:, :1] - self.delta)
            probs_RN = probs_RV.gather(1, tokens_TN[chunk])
            fair.append((probs_RN >= floor_R1) & (probs_RN > 0))
        return torch.cat(fair)


def relaxed_walk(
    tokens: list[int], parents: list[int], sampled: list[int], fair: list[list[bool]]
) -> Walk:
    """From the root to the child that carries the token sampled at its parent, or else to the first
    fair one, while there is one. sampled and fair have a row a node that exists."""
    path = [0]
    while True:
        node = path[-1]
        children = [n for n in range(node + 1, len(sampled)) if parents[n] == node]
        standing = [n for n in children if tokens[n] == sampled[node]]
        standing += [n for n in children if fair[node][n]]
        if not standing:
            return Walk(path, [*(tokens[n] for n in path[1:]), sampled[node]])
        path.append(standing[0])
