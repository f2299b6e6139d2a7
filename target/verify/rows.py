"""Which row of the verification's logits decides what."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import sent
from specengine.layers.logits import PathTokens, RowMap, edit_logits, row_chunks
from specengine.target.verify.tree import ancestor_mask, depths, flat_nodes, node_mask


def ancestors(proposal: DraftProposal) -> Tensor:
    """bool [B, N, N], True where node i is or descends from node j."""
    parents = proposal.parents
    exists = node_mask(proposal.num_nodes, parents.shape[1], parents.device)
    return ancestor_mask(parents, exists)


def row_map(proposal: DraftProposal, sampling: SamplingBatch) -> RowMap:
    """Row of node i: the request it belongs to, its depth, and, where penalties count tokens, the
    drafted tokens from the root's child down to the node itself."""
    if sampling.is_plain:
        return RowMap()
    width, device = proposal.tokens.shape[1], proposal.tokens.device
    nodes = sent(flat_nodes(proposal.num_nodes, width), device)
    penalised = sampling.edits is not None and sampling.edits.penalties is not None
    request, depth = nodes // width, nodes % width
    path = None
    if penalised or not proposal.is_chain:
        mask_BNN = ancestors(proposal)
        depth = depths(mask_BNN).view(-1)[nodes]
        if penalised:
            path = _path_tokens(proposal, request, mask_BNN.view(-1, width)[nodes])
    request, depth = sent(torch.stack([request, depth]), sampling.device)
    return RowMap(request, depth, path and path.to(sampling.device))


def edited_by_chunks(
    logits_TV: Tensor,
    sampling: SamplingBatch,
    rows: RowMap,
    then: Callable[[Tensor, RowMap], Tensor] = lambda edited_RV, _: edited_RV,
) -> Tensor:
    """`then` of the edited logits, some rows at a time, [T, ...]."""
    parts = []
    for chunk in row_chunks(*logits_TV.shape):
        part = rows.part(chunk, len(logits_TV), logits_TV.device)
        parts.append(then(edit_logits(logits_TV[chunk], sampling, part), part))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _path_tokens(proposal: DraftProposal, request_T: Tensor, mask_TN: Tensor) -> PathTokens:
    """The root is committed already, and counted as such."""
    mask_TN = mask_TN.clone()
    mask_TN[:, 0] = False
    return PathTokens(proposal.tokens[request_T].where(mask_TN, 0), mask_TN)
