"""Drafts within grammars."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.engine.grammar.masks import MaskBuilder, masked

if TYPE_CHECKING:
    from specengine.core.grammar import GrammarState


@dataclass(frozen=True)
class HostTree:
    """The draft of one request on the host. All [number of nodes]; parents before children."""

    tokens: list[int]
    parents: list[int]

    def part(self, kept: list[int]) -> HostTree:
        """The tree of these nodes, root first; with each of them, its parent."""
        place = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(place[self.parents[node]] for node in kept[1:])]
        return HostTree([self.tokens[node] for node in kept], parents)


@dataclass(frozen=True)
class LegalNode:
    node: int
    depth: int  # below the root, which has 0


def legal_nodes(state: GrammarState, tree: HostTree) -> Generator[LegalNode, None, None]:
    """The nodes whose path the grammar allows, depth first; while one is looked at, `state` stands
    after it. In the end it stands where it stood."""
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
            req = batch.reqs[index]
            for legal in legal_nodes(_grammar(req), tree):
                builder.add(starts[index] + legal.node, req, _grammar(req), legal.depth)
        return masked(batch, builder.send(batch.sampling.device))


def constrain(batch: ScheduleBatch, proposal: DraftProposal) -> ConstrainedDraft:
    """Cut nodes that a grammar forbids, and all below them; roots stay.

    A node that was sampled (the proposal has draft_probs) stays as a leaf: its verifier must see
    it to reject it, and to draw from the residual in its place. Without it the output would be
    biased towards tokens that the draft allows.
    """
    ruled = [index for index, req in enumerate(batch.reqs) if req.grammar is not None]
    if not ruled:
        return ConstrainedDraft(proposal)
    tokens, parents = proposal.tokens.tolist(), proposal.parents.tolist()
    kept = [list(range(count)) for count in proposal.num_nodes]
    trees = {}
    for index in ruled:
        count = proposal.num_nodes[index]
        tree = HostTree(tokens[index][:count], parents[index][:count])
        kept[index] = _kept(_grammar(batch.reqs[index]), tree, proposal.draft_probs is not None)
        trees[index] = tree.part(kept[index])
    return ConstrainedDraft(_part(proposal, kept, parents, trees), trees)


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


def _part(
    proposal: DraftProposal,
    kept: list[list[int]],
    parents: list[list[int]],
    trees: dict[int, HostTree],
) -> DraftProposal:
    """The proposal with these nodes only, moved to the front of each row."""
    num_nodes = [len(nodes) for nodes in kept]
    if num_nodes == proposal.num_nodes:
        return proposal
    width, device = proposal.tokens.shape[1], proposal.tokens.device
    for index, tree in trees.items():
        parents[index] = tree.parents + [0] * (width - len(tree.parents))
    index_BN = torch.tensor([nodes + [0] * (width - len(nodes)) for nodes in kept])
    packed = torch.stack([index_BN, torch.tensor(parents)]).to(device, non_blocking=True)
    rows = torch.arange(len(kept), device=device)[:, None]

    def take(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None else x[rows, packed[0]]

    return replace(
        proposal,
        tokens=proposal.tokens[rows, packed[0]],
        parents=packed[1],
        num_nodes=num_nodes,
        draft_probs=take(proposal.draft_probs),
        confidence=take(proposal.confidence),
    )
