"""Drafts cut to the depth that each request allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.spec import DraftProposal, VerifyResult
from specengine.engine.draft_depth import cut_to_depth
from specengine.engine.draft_nodes import best_nodes, keep_nodes, path_ranks


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


TREE = [-1, 0, 1, 0, 2, 3]


def ranked(trees: list[list[int]], **more: Any) -> DraftProposal:
    return proposal_of(trees, ranks=[range(len(tree)) for tree in trees], **more)


def result_of(paths: list[list[int]] | None, accepted: list[int]) -> VerifyResult:
    return VerifyResult([[1] * (1 + n) for n in accepted], accepted, [5] * len(accepted), paths)


def test_the_best_nodes_stay() -> None:
    confidence = torch.rand(2, 6)
    proposal = ranked([TREE, TREE[:3]], confidence=confidence)
    cut = best_nodes(proposal, 4)
    assert shown(cut) == [([0, 1, 2, 3], [-1, 0, 1, 0]), ([100, 101, 102], [-1, 0, 1])]
    assert cut.confidence is not None
    assert torch.equal(cut.confidence, confidence[:, :4])
    assert best_nodes(proposal, 6) is proposal
    unknown = proposal_of([TREE])
    assert best_nodes(unknown, 2) is unknown, "it has no ranks"


def test_what_a_depth_leaves_is_ranked_anew() -> None:
    """The best three of no more than one level are the first three of those that are left."""
    cut = cut_to_depth(ranked([TREE, TREE]), [1, None])
    assert cut.ranks == [range(3), range(6)]
    assert shown(best_nodes(cut, 2))[0] == ([0, 1], [-1, 0])
    chain = cut_to_depth(ranked([[-1, 0, 1]], is_chain=True), [1])
    assert chain.ranks == [range(2)]
    assert cut_to_depth(proposal_of([TREE]), [1]).ranks is None


def test_paths_are_told_by_the_ranks_of_their_nodes() -> None:
    """Those that were cut for another reason than size keep their places."""
    proposal = ranked([TREE, TREE])
    paths = result_of([[0, 1, 2], [0]], [2, 0])
    assert path_ranks(proposal, paths) == [[1, 2], []]
    cut = keep_nodes(proposal, [[0, 3, 5], [0, 1, 2, 3, 4, 5]], [TREE, TREE])
    assert path_ranks(cut, paths) == [[3, 5], []]
    assert path_ranks(proposal_of([TREE, TREE]), paths) is None
    chain = ranked([[-1, 0, 1], [-1, 0, 1]], is_chain=True)
    assert path_ranks(chain, result_of(None, [2, 1])) == [[1, 2], [1]]
