"""Verification of deterministic drafts: keep what the target would have said anyway."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch, Tree
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import TokenLogprob
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.layers.logits import PathTokens, RowMap
from specengine.layers.logprobs import token_logprobs
from specengine.layers.sampler import Sampler
from specengine.target.verify.tree import ancestor_mask, depths, flat_nodes, node_mask
from specengine.target.verify.walk import Walk, walk_all


class MatchVerifier:
    """At every node the target's token is sampled exactly as plain decoding would sample it there:
    same logits pipeline, same uniform, keyed by the request's seed and the output position that the
    node decides. The walk then goes from the root to the child that carries the sampled token, as
    long as there is one, and emits the tokens sampled along it; the last is the bonus.

    Lossless by construction: by induction over the walk, the text above each visited node is what
    plain decoding has produced, so the token sampled there is the one that plain decoding produces
    next. For the same logits the output is identical seed by seed, not just in distribution; greedy
    decoding is the special case that needs no uniform. No two positions share a uniform.

    No lossless rule accepts more of a draft fixed in advance: it emits each child of a node with
    the target's probability of that token, so some child stands with at most the sum of their
    probabilities. This rule reaches the sum, as target-only tree sampling does.

    Drafts that were themselves sampled need rejection sampling instead.
    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.sampler = sampler or Sampler()

    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch:
        """A plain DECODE where nobody drafted, else TARGET_VERIFY over the nodes that exist."""
        worker_batch = batch.get_model_worker_batch()
        if _is_empty(proposal):
            return worker_batch
        nodes = flat_nodes(proposal.num_nodes, proposal.tokens.shape[1])
        nodes = nodes.to(proposal.tokens.device, non_blocking=True)
        return replace(
            worker_batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=proposal.tokens.reshape(-1)[nodes],
            extend_lens=list(proposal.num_nodes),
            tree=None if proposal.is_chain else _tree(proposal, nodes),
        )

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        """`output` has a row a node, in the order that prepare gave."""
        sampling = batch.sampling
        if _is_empty(proposal):
            walks = [Walk([0], [token]) for token in self.sampler(output, sampling).tolist()]
        else:
            sampled_T = self.sampler(output, sampling, _row_map(proposal, sampling))
            walks = walk_all(proposal, sampled_T.tolist())
        return VerifyResult(
            tokens=[walk.tokens for walk in walks],
            num_accepted=[len(walk.tokens) - 1 for walk in walks],
            num_drafted=proposal.num_drafted,
            kv_keep=None if proposal.is_chain else [walk.nodes for walk in walks],
            logprobs=_logprobs(output.logits, sampling, proposal, walks),
        )


def _is_empty(proposal: DraftProposal) -> bool:
    return max(proposal.num_nodes, default=1) == 1


def _tree(proposal: DraftProposal, nodes: Tensor) -> Tree:
    mask_BNN = _ancestors(proposal)
    return Tree(depths_T=depths(mask_BNN).view(-1)[nodes], mask_BNN=mask_BNN)


def _ancestors(proposal: DraftProposal) -> Tensor:
    parents = proposal.parents
    exists = node_mask(proposal.num_nodes, parents.shape[1], parents.device)
    return ancestor_mask(parents, exists)


def _row_map(proposal: DraftProposal, sampling: SamplingBatch) -> RowMap:
    """Row of node i: the request it belongs to, its depth, and, where penalties count tokens, the
    drafted tokens from the root's child down to the node itself."""
    if sampling.is_plain:
        return RowMap()
    width, device = proposal.tokens.shape[1], proposal.tokens.device
    nodes = flat_nodes(proposal.num_nodes, width).to(device, non_blocking=True)
    penalised = sampling.edits is not None and sampling.edits.penalties is not None
    request, depth = nodes // width, nodes % width
    path = None
    if penalised or not proposal.is_chain:
        mask_BNN = _ancestors(proposal)
        depth = depths(mask_BNN).view(-1)[nodes]
        if penalised:
            path = _path_tokens(proposal, request, mask_BNN.view(-1, width)[nodes])
    request, depth = torch.stack([request, depth]).to(sampling.device, non_blocking=True)
    return RowMap(request, depth, path and path.to(sampling.device))


def _path_tokens(proposal: DraftProposal, request_T: Tensor, mask_TN: Tensor) -> PathTokens:
    """The root is committed already, and counted as such."""
    mask_TN = mask_TN.clone()
    mask_TN[:, 0] = False
    return PathTokens(proposal.tokens[request_T].where(mask_TN, 0), mask_TN)


def _logprobs(
    logits_TV: Tensor, sampling: SamplingBatch, proposal: DraftProposal, walks: list[Walk]
) -> list[list[TokenLogprob]] | None:
    """Beside the emitted tokens; an empty list for each request that asks for none."""
    if sampling.max_logprobs is None:
        return None
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    asked = [count is not None for count in sampling.logprobs]
    start = 0
    for walk, count, num_nodes in zip(walks, sampling.logprobs, proposal.num_nodes, strict=True):
        if count is not None:
            rows += [start + node for node in walk.nodes]
            tokens += walk.tokens
            counts += [count] * len(walk.nodes)
        start += num_nodes
    index = torch.tensor([rows, tokens], device=logits_TV.device)
    found = iter(token_logprobs(logits_TV, index[0], index[1], counts))
    return [
        [next(found) for _ in walk.nodes] if asks else []
        for walk, asks in zip(walks, asked, strict=True)
    ]
