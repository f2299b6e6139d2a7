"""A long suffix match in place of another drafter's proposal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter, DraftsOn
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
from specengine.draft.proposals import Draft, assemble
from specengine.draft.suffix.drafter import SuffixDrafter


class HybridDrafter(Drafter):
    """Suffixes predict copied text better, at no cost; everything else is left to `inner`.

    Each request is treated by itself: one whose text ends in at least suffix.min_match tokens that
    were seen before drafts what followed them. Where all do, `inner` does not draft. It observes
    every round all the same, so it must read what was accepted whatever its source.
    """

    def __init__(self, inner: Drafter, suffix: SuffixDrafter) -> None:
        self.inner = inner
        self.suffix = suffix
        self.needs_hidden = inner.needs_hidden
        self.draft_vocab_size = inner.draft_vocab_size
        self.kv_lookahead = inner.kv_lookahead
        self.emits_probs = inner.emits_probs
        self.proposes_tree = inner.proposes_tree or suffix.proposes_tree
        self.max_nodes = max(inner.max_nodes, suffix.max_nodes)

    @property
    def drafts_on(self) -> DraftsOn:  # type: ignore[override]
        return self.inner.drafts_on

    @property
    def lookup(self) -> Drafter | None:  # type: ignore[override]
        """Two lookup drafters are one source."""
        return None if self.inner.drafts_on == "lookup" else self.suffix

    @property
    def model_drafter(self) -> Drafter:
        return self if self.lookup is None else self.inner

    @property
    def begins_async(self) -> bool:  # type: ignore[override]
        return self.inner.begins_async

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.inner.begin(batch, output, result)
        self.suffix.begin(batch, output, result)

    def begin_async(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        self.inner.begin_async(batch, output, tokens_S)
        self.suffix.add(batch.reqs)

    def captures(self) -> Iterator[Callable[[], object]]:
        return self.inner.captures()

    def precompile_calls(self) -> Iterator[Callable[[], object]]:
        return self.inner.precompile_calls()

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        drafts = [self._long_match(req) for req in batch.reqs]
        found = [draft for draft in drafts if draft is not None]
        if len(found) == len(drafts):
            proposal = replace(assemble(found, is_ranked=True), from_lookup=[True] * len(found))
        else:
            proposal = self.inner.draft(batch)
            proposal = override(proposal, drafts) if found else proposal
        return self._weighable(proposal, batch.sampling) if found else proposal

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        self.inner.observe(batch, output, result)
        self.suffix.observe(batch, output, result)

    def num_tree_nodes(self, num_steps: int) -> int:
        """Nodes of lookup's trees alone."""
        readers = [one for one in (self.inner, self.suffix) if one.drafts_on == "lookup"]
        return max(one.num_tree_nodes(num_steps) for one in readers)

    def index_ahead(self, req: Req, most: int) -> None:
        for one in (self.inner, self.suffix):
            one.index_ahead(req, most)

    def release(self, req: Req) -> None:
        self.inner.release(req)
        self.suffix.release(req)

    def _weighable(self, proposal: DraftProposal, sampling: SamplingBatch) -> DraftProposal:
        """With draft_probs wherever drafts are sampled, even if none was in this round: how drafts
        of text are verified, and so the text of a seed, must not depend on the rest of the
        batch."""
        if not self.emits_probs or sampling.all_greedy or proposal.draft_probs is not None:
            return proposal
        tokens_BN = proposal.tokens.to(sampling.device)
        return replace(proposal, draft_probs=_one_hot(tokens_BN, sampling.vocab_size))

    def _long_match(self, req: Req) -> Draft | None:
        draft = self.suffix.draft_one(req)
        return draft if len(draft.tokens) > 1 else None


def override(proposal: DraftProposal, drafts: Sequence[Draft | None]) -> DraftProposal:
    """The proposal with the drafts in place of its own where there are any. They were certain, so
    their draft_probs, where the proposal has those, are one-hot."""
    ours = assemble([draft or Draft([0], confidence=[1.0]) for draft in drafts])
    device, width = proposal.tokens.device, max(proposal.tokens.shape[1], ours.tokens.shape[1])
    chosen = [draft is not None for draft in drafts]
    chosen_B = torch.tensor(chosen).to(device)

    def merge(theirs: Tensor, ours: Tensor) -> Tensor:
        chosen = chosen_B.view(-1, *[1] * (theirs.dim() - 1))
        return torch.where(chosen, _widen(ours.to(device), width), _widen(theirs, width))

    probs, confidence = proposal.draft_probs, proposal.confidence
    if probs is not None:
        probs = merge(probs, _one_hot(ours.tokens.to(device), probs.shape[2]))
    counts = zip(drafts, ours.num_nodes, proposal.num_nodes, strict=True)
    num_nodes = [theirs if draft is None else own for draft, own, theirs in counts]
    return replace(
        proposal,
        tokens=merge(proposal.tokens, ours.tokens),
        parents=merge(proposal.parents, ours.parents),
        num_nodes=num_nodes,
        is_chain=proposal.is_chain and ours.is_chain,
        draft_probs=probs,
        confidence=None
        if confidence is None or ours.confidence is None
        else merge(confidence, ours.confidence),
        ranks=_ranks(proposal, drafts, num_nodes),
        from_lookup=chosen,
    )


def _ranks(
    proposal: DraftProposal, drafts: Sequence[Draft | None], num_nodes: list[int]
) -> list[Sequence[int]] | None:
    """Ranks of suffixes' drafts, and of those chains and trees whose nodes are in order of rank."""
    theirs = proposal.ranks
    if proposal.is_chain and proposal.draft_probs is None:
        theirs = [range(count) for count in num_nodes]
    if theirs is None:
        return None
    triples = zip(drafts, num_nodes, theirs, strict=True)
    return [ranks if draft is None else range(count) for draft, count, ranks in triples]


def _one_hot(tokens_BN: Tensor, vocab_size: int) -> Tensor:
    probs_BNV = torch.zeros(*tokens_BN.shape, vocab_size, device=tokens_BN.device)
    return probs_BNV.scatter_(2, tokens_BN[:, :, None], 1.0)


def _widen(one: Tensor, width: int) -> Tensor:
    """[B, N] or [B, N, V] with N padded with 0."""
    missing = width - one.shape[1]
    return pad(one, [0, 0] * (one.dim() - 2) + [0, missing])
