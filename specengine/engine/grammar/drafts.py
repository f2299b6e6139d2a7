"""Drafts within grammars."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.engine.draft_nodes import HostTree, keep_nodes
from specengine.engine.grammar.masks import Flags, MaskBuilder, masked
from specengine.engine.grammar.state import LlguidanceState

if TYPE_CHECKING:
    from specengine.core.grammar import GrammarState


@dataclass(frozen=True)
class LegalNode:
    node: int
    depth: int  # below the root, which has 0


def legal_nodes(state: GrammarState, tree: HostTree) -> Generator[LegalNode, None, None]:
    """The nodes whose path the grammar allows, depth first; while one is looked at, `state` is
    after it. In the end it is where it was."""
    path, illegal = [0], set[int]()
    try:
        yield LegalNode(0, 0)
        for node in _depth_first(tree.parents):
            parent = tree.parents[node]
            if parent in illegal:
                illegal.add(node)
                continue
            below = len(path) - 1 - path.index(parent)
            state.take_back(below)
            del path[len(path) - below :]
            if state.accept(tree.tokens[node]):
                path.append(node)
                yield LegalNode(node, len(path) - 1)
            else:
                illegal.add(node)
    finally:
        state.take_back(len(path) - 1)


def _depth_first(parents: list[int]) -> Iterator[int]:
    """Every node below the root."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
    waiting = children[0]
    while waiting:
        yield (node := waiting.pop())
        waiting += children[node]


@dataclass(frozen=True)
class ConstrainedDraft:
    """A proposal without what the grammars of its requests forbid, and the trees that are left of
    those requests, by index into the batch."""

    proposal: DraftProposal
    trees: dict[int, HostTree] = field(default_factory=dict)

    def masked(self, batch: ScheduleBatch) -> ScheduleBatch:
        """With masks for the rows of the verification: one a node, request after request. On the
        host; meant to run while the device computes the logits."""
        if not self.trees:
            return batch
        starts = [0, *accumulate(self.proposal.num_nodes)]
        builder = MaskBuilder(starts[-1], batch.sampling.vocab_size)
        for index, tree in self.trees.items():
            add_masks(builder, starts[index], batch.reqs[index], tree)
        return masked(batch, builder.send(batch.sampling.device))


def add_masks(builder: MaskBuilder, first_row: int, req: Req, tree: HostTree) -> None:
    """Add the masks of a request with a grammar: a row a node, from `first_row` on. Rows of nodes
    that it forbids are not added: no path leads there."""
    state = _grammar(req)
    if tree.is_chain and isinstance(state, LlguidanceState) and state.error is None:
        builder.add_chain(first_row, req, state, tree.tokens[1:])
        return
    for legal in legal_nodes(state, tree):
        builder.add(first_row + legal.node, req, state, legal.depth)


def constrain(batch: ScheduleBatch, proposal: DraftProposal) -> ConstrainedDraft:
    """Cut nodes that a grammar forbids, and all below them; roots stay.

    A node that was sampled (the proposal has draft_probs, and the request is not greedy) stays as a
    leaf: its verifier must see it to reject it, and to draw from the residual in its place. Without
    it the output would be biased towards tokens that the draft allows.
    """
    constrained = [index for index, req in enumerate(batch.reqs) if req.grammar is not None]
    if not constrained:
        return ConstrainedDraft(proposal)
    tokens, parents = proposal.tokens.tolist(), proposal.parents.tolist()
    kept = [list(range(count)) for count in proposal.num_nodes]
    trees = {}
    for index in constrained:
        count = proposal.num_nodes[index]
        tree = HostTree(tokens[index][:count], parents[index][:count])
        req = batch.reqs[index]
        was_drawn = proposal.draft_probs is not None and not req.sampling.is_greedy
        kept[index] = _kept(_grammar(req), tree, was_drawn)
        trees[index] = tree.part(kept[index])
    return ConstrainedDraft(keep_nodes(proposal, kept, parents), trees)


def kept_nodes(legal_BN: Flags, trees: list[HostTree], were_drawn: Sequence[bool]) -> Flags:
    """[B, N], the nodes that `constrain` leaves of trees of one size, of which the grammars allow
    these. were_drawn: whether they were sampled, by request."""
    if not any(were_drawn):
        return legal_BN
    parents_BN = np.array([tree.parents for tree in trees]).clip(min=0)
    kept_BN: Flags = np.take_along_axis(legal_BN, parents_BN, axis=1)
    kept_BN &= np.array(were_drawn)[:, None]
    kept_BN |= legal_BN
    return kept_BN


def _grammar(req: Req) -> GrammarState:
    assert req.grammar is not None
    return req.grammar


def _kept(state: GrammarState, tree: HostTree, keeps_rejected: bool) -> list[int]:
    legal = {one.node for one in legal_nodes(state, tree)}
    return [
        node
        for node, parent in enumerate(tree.parents)
        if node in legal or (keeps_rejected and parent in legal)
    ]
