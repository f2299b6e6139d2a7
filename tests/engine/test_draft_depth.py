"""Drafts cut to the depth that each request allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.spec import DraftProposal
from specengine.engine.draft_depth import cut_to_depth


def proposal_of(trees: list[list[int]], **more: Any) -> DraftProposal:
    """Trees by their parents; node i of request r is the token 100 r + i."""
    width = max(len(parents) for parents in trees)
    parents = torch.tensor([[*tree, *[7] * (width - len(tree))] for tree in trees])
    tokens = torch.arange(width) + 100 * torch.arange(len(trees))[:, None]
    counts = [len(tree) for tree in trees]
    return DraftProposal(tokens, parents, counts, **{"is_chain": False, **more})


def shown(proposal: DraftProposal) -> list[tuple[list[int], list[int]]]:
    rows = zip(proposal.tokens.tolist(), proposal.parents.tolist(), proposal.num_nodes, strict=True)
    return [(tokens[:count], parents[:count]) for tokens, parents, count in rows]


def test_chains_are_shortened() -> None:
    chain = [-1, 0, 1, 2]
    proposal = proposal_of([chain, chain, chain, chain[:2]], is_chain=True)
    cut = cut_to_depth(proposal, [None, 0, 2, 3])
    assert cut.num_nodes == [4, 1, 3, 2]
    assert cut.tokens is proposal.tokens


def test_trees_lose_what_lies_deeper() -> None:
    """Depth first, so that what stays has to move up."""
    tree = [-1, 0, 1, 2, 0, 4]
    probs, confidence = torch.rand(3, 6, 5), torch.rand(3, 6)
    proposal = proposal_of([tree, tree, tree], draft_probs=probs, confidence=confidence)
    cut = cut_to_depth(proposal, [1, None, 0])
    assert shown(cut) == [
        ([0, 1, 4], [-1, 0, 0]),
        ([100, 101, 102, 103, 104, 105], tree),
        ([200], [-1]),
    ]
    assert cut.draft_probs is not None
    assert torch.equal(cut.draft_probs[0, :3], probs[0, [0, 1, 4]])
    assert cut.confidence is not None
    assert torch.equal(cut.confidence[1], confidence[1])


@pytest.mark.parametrize("limits", [[None, None], [3, None]])
def test_nothing_is_copied_where_nothing_is_cut(limits: list[int | None]) -> None:
    proposal = proposal_of([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    assert cut_to_depth(proposal, limits).tokens is proposal.tokens


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@given(st.lists(st.tuples(trees(), st.none() | st.integers(0, 4)), min_size=1, max_size=4))
def test_the_nodes_of_short_paths_stay(batch: list[tuple[list[int], int | None]]) -> None:
    """Every node is still below the node that it was below."""
    cut = cut_to_depth(proposal_of([tree for tree, _ in batch]), [limit for _, limit in batch])
    for row, ((tree, limit), (tokens, parents)) in enumerate(zip(batch, shown(cut), strict=True)):
        nodes = [token - 100 * row for token in tokens]
        depths = [0]
        for parent in tree[1:]:
            depths.append(depths[parent] + 1)
        deepest = len(tree) if limit is None else limit
        assert nodes == [node for node, depth in enumerate(depths) if depth <= deepest]
        above = [nodes[parent] if parent >= 0 else -1 for parent in parents]
        assert above == [tree[node] for node in nodes]
