"""Paths that a rule has decided on, against walks from their ends to the roots."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specengine.kernels.accept.accept_path import accept_path
from specengine.kernels.accept.types import Accepted
from specengine.kernels.dispatch import Backend
from specengine.kernels.tree.tree_build_ref import climb
from specengine.kernels.tree.types import DraftTree
from specengine.target.verify.walk import path_to
from tests.kernels.test_accept_tree import CONTEXT, NODES, STEPS, paths_of, random_tree, state_of

pytestmark = pytest.mark.parametrize("backend", ["torch", "triton"])


def trees_of(parents: list[list[int]], tokens: list[list[int]], device: torch.device) -> DraftTree:
    found = climb(torch.tensor(tokens), torch.tensor(parents), STEPS)
    every = found.tokens_BN, found.parents_BN, found.depths_BN, found.mask_BNN
    return DraftTree(*(x.to(device) for x in every))


def found_of(ends: list[int], tokens: list[int], device: torch.device) -> Accepted:
    return Accepted(torch.tensor(ends, device=device), torch.tensor(tokens, device=device))


@pytest.mark.parametrize("seed", range(8))
def test_paths_from_the_root_to_where_they_end(
    seed: int, backend: Backend, device: torch.device
) -> None:
    rng = random.Random(seed)
    trees, counts = [random_tree(rng) for _ in range(4)], [NODES, rng.randrange(1, NODES), 1, NODES]
    for (parents, tokens), count in zip(trees, counts, strict=True):
        parents[count:], tokens[count:] = range(count, NODES), [0] * (NODES - count)
    parents, tokens = [p for p, _ in trees], [t for _, t in trees]
    ends = [rng.randrange(count) for count in counts]
    ends[0] = max(range(NODES), key=lambda node: len(path_to(node, parents[0])))
    lasts = [rng.randrange(12) for _ in trees]
    state = state_of([0, 10, 20, CONTEXT - 2, 30], device)
    rows = [3, 0, 1, 4]
    tree, found = trees_of(parents, tokens, device), found_of(ends, lasts, device)
    given = torch.tensor(rows, device=device), found, tree, STEPS, CONTEXT
    paths = accept_path(state, *given, backend=backend)
    walks = [path_to(end, row) for end, row in zip(ends, parents, strict=True)]
    assert paths_of(paths) == walks
    assert len(walks[0]) > 2
    for b, walk in enumerate(walks):
        said = [*(tokens[b][node] for node in walk[1:]), lasts[b]]
        missing = STEPS + 1 - len(walk)
        assert paths.tokens_BW[b].tolist() == said + said[:1] * missing
        assert paths.nodes_BW[b].tolist() == walk + [0] * missing
        assert paths.rows_T.view(4, -1)[b].tolist() == [NODES * b + n for n in walk + [0] * missing]
        outcome = [len(walk) - 1, *said, *said[:1] * missing, *walk[1:], *[0] * missing]
        assert state.outcomes[0, b].tolist() == [*outcome, counts[b] - 1]
    lens, roots = [0, 10, 20, CONTEXT - 2, 30], [0] * 5
    for row, walk, last in zip(rows, walks, lasts, strict=True):
        if row:
            lens[row], roots[row] = min(lens[row] + len(walk), CONTEXT - 1), last
    assert state.lens.tolist() == lens
    assert state.roots.tolist() == roots


def test_tokens_of_children_stand_for_nothing(backend: Backend, device: torch.device) -> None:
    """Neither that of the end's child, nor one that equals it higher up."""
    tree = trees_of([[-1, 0, 0, 2, 3, 3]], [[5, 7, 8, 7, 7, 6]], device)
    rows = torch.tensor([1], device=device)
    for end, path in ((0, [0]), (2, [0, 2]), (3, [0, 2, 3])):
        state = state_of([0, 3], device)
        given = rows, found_of([end], [7], device), tree, STEPS, CONTEXT
        found = accept_path(state, *given, backend=backend)
        assert paths_of(found) == [path]
        assert found.tokens_BW[0, : len(path)].tolist() == [*[8, 7][: len(path) - 1], 7]
        assert state.lens[1] == 3 + len(path)


def test_each_turn_has_its_half(backend: Backend, device: torch.device) -> None:
    tree = trees_of([[-1, 0]], [[5, 7]], device)
    state = state_of([0, 3], device)
    state.turn.fill_(1)
    given = torch.tensor([1], device=device), found_of([1], [9], device), tree, 1, CONTEXT
    accept_path(replace(state), *given, backend=backend)
    assert state.roots.tolist() == [0, 9], "outcomes are pinned: this waits for them, too"
    assert state.outcomes[1, 0, :5].tolist() == [1, 7, 9, 1, 1]
    assert not state.outcomes[0].any()
