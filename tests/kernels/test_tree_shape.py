"""Trees by their parents: what follows from these, and nodes that no path comes by."""

from __future__ import annotations

import random

import pytest
import torch

from specengine.kernels.accept.accept_tree import accept_tree
from specengine.kernels.accept.types import Simulated
from specengine.kernels.dispatch import Backend
from specengine.kernels.tree.tree_shape import tree_shape
from tests.kernels.test_accept_tree import CONTEXT, paths_of, state_of

TREE = [[7, 10, 11, 20, 21, 22], [-1, 0, 0, 1, 1, 2]]
FIELDS = ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN")
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


def given(trees: list[list[list[int]]], device: torch.device) -> torch.Tensor:
    return torch.tensor(trees, device=device)


def random_nodes(rng: random.Random, size: int, most: int) -> list[list[list[int]]]:
    """Trees of any number of nodes, in any order that has parents first; padded."""
    trees = []
    for _ in range(size):
        count = rng.randint(1, most)
        parents = [-1, *(rng.randrange(node) for node in range(1, count))]
        tokens = [rng.randrange(5) for _ in range(most)]
        trees.append([tokens, parents + list(range(count, most))])
    return trees


def path_of(parents: list[int], node: int) -> list[int]:
    """Up to the root, or to a node that is its own parent."""
    path = [node]
    while parents[path[-1]] not in (-1, path[-1]):
        path.append(parents[path[-1]])
    return path


@BACKENDS
def test_a_tree(backend: Backend, device: torch.device) -> None:
    """
    9 ─┬─ 10 ─┬─ 20
       │      └─ 21
       └─ 11 ─── 22
    """
    roots = torch.tensor([9], device=device)
    tree = tree_shape(roots, given([TREE], device), 6, 2, backend=backend)
    assert tree.tokens_BN.tolist() == [[9, 10, 11, 20, 21, 22]], "the root is the round's"
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 1, 1, 2]]
    assert tree.depths_BN.tolist() == [[0, 1, 1, 2, 2, 2]]
    assert tree.mask_BNN[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


@BACKENDS
@pytest.mark.parametrize("count", [2, 3, 16, 17, 40])
def test_what_follows_from_parents(count: int, backend: Backend, device: torch.device) -> None:
    """Also of the first nodes of larger trees, and of rows that lie apart."""
    trees = random_nodes(random.Random(count), 5, 40)
    nodes = given(trees, device)
    roots = torch.arange(50, 55, device=device)
    tree = tree_shape(roots, nodes, count, 39, backend=backend)
    for b, (tokens, parents) in enumerate(trees):
        assert tree.tokens_BN[b].tolist() == [50 + b, *tokens[1:count]]
        assert tree.parents_BN[b].tolist() == parents[:count]
        for node in range(count):
            path = path_of(parents, node)
            is_there = path[-1] == 0
            assert tree.depths_BN[b, node] == (len(path) - 1 if is_there else 39)
            seen = tree.mask_BNN[b, node].nonzero().flatten().tolist()
            assert seen == sorted(path)
    wider = torch.zeros(5, 3, 64, dtype=torch.int64, device=device)
    wider[:, 1:, :40] = nodes
    apart = tree_shape(roots, wider[:, 1:], count, 39, backend=backend)
    for name in FIELDS:
        assert getattr(apart, name).is_contiguous()
        assert torch.equal(getattr(apart, name), getattr(tree, name)), name


@BACKENDS
@pytest.mark.parametrize("simulated", [None, Simulated(9, 0.0)], ids=["chosen", "simulated"])
def test_nodes_that_are_their_own_parents_never_stand(
    simulated: Simulated | None, backend: Backend, device: torch.device
) -> None:
    """Though each has the token that is chosen wherever it would stand."""
    nodes = given(
        [[[0, 5, 5, 5, 5], [-1, 0, 2, 3, 4]], [[0, 5, 5, 5, 5], [-1, 1, 2, 3, 4]]], device
    )
    roots = torch.tensor([5, 5], device=device)
    tree = tree_shape(roots, nodes, 5, 4, backend=backend)
    chosen, rows = torch.full((2, 5), 5, device=device), torch.tensor([1, 2], device=device)
    state, rules = state_of([0, 3, 8], device), (4, CONTEXT, simulated)
    found = accept_tree(state, rows, chosen, tree, *rules, backend=backend)
    assert paths_of(found) == [[0, 1], [0]]
    assert found.nodes_BW[:, 2:].unique().tolist() == [0]
    assert state.lens.tolist() == [0, 5, 9]
