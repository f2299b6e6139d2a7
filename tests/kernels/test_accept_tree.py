"""Acceptance of trees, against the verifier's own walk, and the KV that follows it."""

from __future__ import annotations

import random

import pytest
import torch

from specengine.kernels.accept.accept_tree import accept_tree
from specengine.kernels.accept.types import AcceptedPaths, RoundState, Simulated
from specengine.kernels.dispatch import Backend
from specengine.kernels.kv.kv_move import kv_move
from specengine.kernels.kv.types import KVBuffers, KVPaths
from specengine.kernels.tree.types import DraftTree
from specengine.target.verify.simulated import first_children
from specengine.target.verify.walk import walk

NODES, STEPS, CONTEXT = 9, 4, 60

pytestmark = pytest.mark.parametrize("backend", ["torch", "triton"])


def random_tree(rng: random.Random) -> tuple[list[int], list[int]]:
    """Parents, in topological order and no deeper than STEPS, and tokens; siblings differ."""
    parents, depths, tokens = [-1], [0], [0]
    while len(parents) < NODES:
        parent = rng.choice([i for i, depth in enumerate(depths) if depth < STEPS])
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(rng.choice([token for token in range(12) if token not in taken]))
    order = sorted(range(NODES), key=lambda i: depths[i])
    place = {node: i for i, node in enumerate(order)}
    return [place.get(parents[i], -1) for i in order], [tokens[i] for i in order]


def tree_of(parents: list[list[int]], tokens: list[list[int]], device: torch.device) -> DraftTree:
    """As far as acceptance reads it."""
    none = torch.empty(0, device=device)
    return DraftTree(
        torch.tensor(tokens, device=device), torch.tensor(parents, device=device), none, none
    )


def state_of(lens: list[int], device: torch.device) -> RoundState:
    state = RoundState.of(len(lens), 4, STEPS, device)
    state.lens.copy_(torch.tensor(lens))
    return state


def paths_of(found: AcceptedPaths) -> list[list[int]]:
    pairs = zip(found.nodes_BW.tolist(), found.accepted_B.tolist(), strict=True)
    return [nodes[: accepted + 1] for nodes, accepted in pairs]


@pytest.mark.parametrize("seed", range(8))
def test_the_walk_of_the_verifier(seed: int, backend: Backend, device: torch.device) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(3)]
    chosen = []
    for parents, tokens in trees:
        row = [rng.randrange(12) for _ in range(NODES)]
        for node in range(NODES - 1, 0, -1):
            if rng.random() < 0.8:
                row[parents[node]] = tokens[node]
        chosen.append(row)
    state = state_of([0, 10, 20, CONTEXT - 2], device)
    taken = torch.tensor([3, 0, 1], device=device)
    tree = tree_of([p for p, _ in trees], [t for _, t in trees], device)
    chosen_BN = torch.tensor(chosen, device=device)
    found = accept_tree(state, taken, chosen_BN, tree, STEPS, CONTEXT, backend=backend)
    walks = [walk(t, p, c) for (p, t), c in zip(trees, chosen, strict=True)]
    assert paths_of(found) == [one.nodes for one in walks]
    for b, one in enumerate(walks):
        assert found.tokens_BW[b, : len(one.tokens)].tolist() == one.tokens
        outcome = state.outcomes[0, b].tolist()
        assert outcome[: len(one.tokens) + 1] == [len(one.tokens) - 1, *one.tokens]
        assert outcome[STEPS + 2 : -1] == found.nodes_BW[b, 1:].tolist()
        assert set(found.nodes_BW[b, len(one.nodes) :].tolist()) <= {0}
        rows = found.rows_T.view(found.nodes_BW.shape)[b]
        assert (rows - NODES * b).tolist() == found.nodes_BW[b].tolist()
    assert state.lens.tolist() == [0, 10 + len(walks[2].nodes), 20, CONTEXT - 1]
    assert state.roots.tolist() == [0, walks[2].tokens[-1], 0, walks[0].tokens[-1]]


@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_a_request_may_limit_what_stands(
    limit: int, backend: Backend, device: torch.device
) -> None:
    tree = tree_of([[-1, 0, 0, 2, 3]], [[5, 6, 7, 7, 7]], device)
    state = state_of([0, 3], device)
    state.max_accepted[1] = limit
    chosen, rows = torch.full((1, 5), 7, device=device), torch.tensor([1], device=device)
    chosen[0, 3] = 8
    found = accept_tree(state, rows, chosen, tree, 3, CONTEXT, backend=backend)
    kept = min(limit, 2)
    assert paths_of(found) == [[0, 2, 3][: kept + 1]]
    assert found.tokens_BW[0, : kept + 1].tolist() == [7, 7, 8][: kept + 1]
    assert set(found.nodes_BW[0, kept + 1 :].tolist()) <= {0}
    assert state.lens[1] == 4 + kept
    assert state.roots[1] == (8 if kept == 2 else 7)


def test_the_first_of_equal_siblings(backend: Backend, device: torch.device) -> None:
    tree = tree_of([[-1, 0, 0, 2]], [[5, 7, 7, 7]], device)
    chosen = torch.full((1, 4), 7, device=device)
    found = accept_tree(
        state_of([0, 3], device),
        torch.tensor([1], device=device),
        chosen,
        tree,
        2,
        CONTEXT,
        backend=backend,
    )
    assert paths_of(found) == [[0, 1]]


def test_simulated_paths_go_down_first_children(backend: Backend, device: torch.device) -> None:
    parents, tokens = random_tree(random.Random(5))
    tree = tree_of([parents], [tokens], device)
    chosen = torch.full((1, NODES), 50, device=device)
    rows = torch.tensor([1], device=device)
    state = state_of([0, 4], device)
    most = len(first_children(parents, STEPS)) - 1
    counts = []
    for _ in range(20):
        given = STEPS, 10**6, Simulated(1, 0.5)
        found = accept_tree(state, rows, chosen, tree, *given, backend=backend)
        counts.append(int(found.accepted_B))
        assert paths_of(found) == [first_children(parents, counts[-1])]
    assert most >= 2
    assert set(counts) == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kv_follows_the_path(dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    torch.manual_seed(0)
    table = (1 + torch.randperm(39)).view(3, 13).int().to(device)
    table[0] = 0
    buffers = [torch.randn(40, 3, 62, device=device).to(dtype) for _ in range(4)]
    expected = [one.clone() for one in buffers]
    rows, lens = [2, 0, 1], [5, 0, 9]
    paths, accepted = [[0, 2, 3, 7], [0, 3, 0, 0], [0, 1, 3, 6]], [3, 1, 2]
    for row, length, path, count in zip(rows, lens, paths, accepted, strict=True):
        slots = table[row, length:].tolist()
        if row:
            for one, whole in zip(expected, buffers, strict=True):
                for k in range(count + 1):
                    one[slots[k]] = whole[slots[path[k]]]
    given = (torch.tensor(one, device=device) for one in (rows, lens, paths, accepted))
    kv_move(KVBuffers.of(buffers), KVPaths(table, *given), backend=backend)
    for one, whole in zip(buffers, expected, strict=True):
        assert torch.equal(one, whole)


def test_nothing_moves_past_the_table(backend: Backend, device: torch.device) -> None:
    table = torch.arange(12, device=device).int().view(2, 6)
    buffers = [torch.randn(12, 1, 4, device=device) for _ in range(2)]
    expected = [one.clone() for one in buffers]
    for one in expected:
        one[10] = one[11]  # places 4 and 5 of row 1
    given = (torch.tensor(one, device=device) for one in ([1], [3], [[0, 2, 4]], [2]))
    kv_move(KVBuffers.of(buffers), KVPaths(table, *given), backend=backend)
    for one, whole in zip(buffers, expected, strict=True):
        assert torch.equal(one, whole)
