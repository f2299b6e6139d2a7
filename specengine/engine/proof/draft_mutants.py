"""Mistakes in what a drafter proposes and reports, under rules that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult

# Proposals whose draft_probs are there -> the same, spoilt.
Spoil = Callable[[DraftProposal, Tensor], DraftProposal]


class SpoiltDrafter(Drafter):
    """A drafter whose sampled proposals are spoilt; everything else is its own. Its rounds run on
    the host."""

    def __init__(self, inner: Drafter, spoil: Spoil) -> None:
        self.inner = inner
        self.needs_hidden = inner.needs_hidden
        self.proposes_tree = inner.proposes_tree
        self.emits_probs = inner.emits_probs
        self.max_nodes = inner.max_nodes
        self.kv_lookahead = inner.kv_lookahead
        self._spoil = spoil

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.inner.begin(batch, output, result)

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        self.inner.observe(batch, output, result)

    def release(self, req: Req) -> None:
        self.inner.release(req)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        proposal = self.inner.draft(batch)
        if proposal.draft_probs is None:
            return proposal
        return self._spoil(proposal, proposal.draft_probs)


def next_node(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    return replace(proposal, draft_probs=torch.cat([probs_BNV[:, 1:], probs_BNV[:, -1:]], dim=1))


def neighbouring_parent(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    """Each node has the row of the first node below another parent, the next one in order."""
    parents_N = proposal.parents[0].tolist()
    order = sorted(set(parents_N[1:]))
    first = {parent: parents_N.index(parent) for parent in order}
    after = {parent: first[order[(i + 1) % len(order)]] for i, parent in enumerate(order)}
    nodes = [0, *(after[parent] for parent in parents_N[1:])]
    return replace(proposal, draft_probs=probs_BNV[:, nodes])


def other_request(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    return replace(proposal, draft_probs=probs_BNV.roll(1, dims=0))


def other_temperature(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    """As before it was applied: drawn at half of it."""
    return replace(proposal, draft_probs=probs_BNV.sqrt())


def last_siblings_turned(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    """The last two leaves below one parent, swapped: not in the order in which they were drawn."""
    parents_N = proposal.parents[0].tolist()
    leaves = [node for node in range(1, len(parents_N)) if node not in parents_N]
    pairs = [(a, b) for a, b in pairwise(leaves) if parents_N[a] == parents_N[b]]
    order = list(range(len(parents_N)))
    a, b = pairs[-1]
    order[a], order[b] = b, a
    return replace(proposal, tokens=proposal.tokens[:, order])


def other_tokens(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    """Drafted tokens are off by one, as by a wrong map from the draft's vocabulary; the
    probabilities are not."""
    tokens_BN = proposal.tokens.clone()
    tokens_BN[:, 1:] = (tokens_BN[:, 1:] + 1) % probs_BNV.shape[2]
    return replace(proposal, tokens=tokens_BN)


def cut_by_own_token(proposal: DraftProposal, probs_BNV: Tensor) -> DraftProposal:
    """A chain ends before a token that was drawn against the odds."""
    own_BN = probs_BNV.gather(2, proposal.tokens[:, :, None])[:, :, 0]
    likely_BN = own_BN >= 0.5 * probs_BNV.amax(-1)
    length_B = 1 + likely_BN[:, 1:].long().cumprod(-1).sum(-1)
    pairs = zip(proposal.num_nodes, length_B.tolist(), strict=True)
    return replace(proposal, num_nodes=[min(pair) for pair in pairs])


@dataclass(frozen=True)
class DraftMutant:
    name: str
    spoil: Spoil
    chains: bool = True
    trees: bool = True


DRAFT_MUTANTS = (
    DraftMutant("weights of the next node", next_node, trees=False),
    DraftMutant("weights of a neighbouring parent", neighbouring_parent, chains=False),
    DraftMutant("weights of another request", other_request),
    DraftMutant("weights before temperature", other_temperature),
    DraftMutant("siblings in another order", last_siblings_turned, chains=False),
    DraftMutant("tokens off by one", other_tokens),
    DraftMutant("cut by its own token", cut_by_own_token, trees=False),
)


def draft_mutants(*, trees: bool) -> Iterator[DraftMutant]:
    return (one for one in DRAFT_MUTANTS if (one.trees if trees else one.chains))
