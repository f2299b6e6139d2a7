"""EAGLE-2's selection against choosing nodes one at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.tree_select import Candidates, best, select

ROOT = 99


def candidates(rows: list[tuple[int, float, int]], exists: list[bool] | None = None) -> Candidates:
    """One request's (token, score, parent)."""
    tokens, scores, parents = zip(*rows, strict=True)
    return Candidates(
        torch.tensor([tokens]),
        torch.tensor([scores]),
        torch.tensor([parents]),
        torch.tensor([exists or [True] * len(rows)]),
    )


def nodes(found: Candidates, num_nodes: int) -> tuple[list[int], list[int]]:
    selection = select(torch.tensor([[ROOT]]), found, [num_nodes])
    kept = 1 + int((selection.candidates_BM < found.tokens_BC.shape[1]).sum())
    return selection.tokens_BN[0, :kept].tolist(), selection.parents_BN[0, :kept].tolist()


# 99 ─┬─ 10 (0.6) ─┬─ 20 (0.5)
#     │            └─ 21 (0.1)
#     └─ 11 (0.3) ─── 22 (0.2)
TREE = [
    (10, math.log(0.6), -1),
    (11, math.log(0.3), -1),
    (20, math.log(0.5), 0),
    (21, math.log(0.1), 0),
    (22, math.log(0.2), 1),
]


@pytest.mark.parametrize(
    ("num_nodes", "tokens", "parents"),
    [
        (1, [99], [-1]),
        (2, [99, 10], [-1, 0]),
        (3, [99, 10, 20], [-1, 0, 1]),
        (4, [99, 10, 20, 11], [-1, 0, 1, 0]),
        (5, [99, 10, 20, 11, 22], [-1, 0, 1, 0, 3]),
        (6, [99, 10, 20, 11, 22, 21], [-1, 0, 1, 0, 3, 1]),
    ],
)
def test_the_most_probable_paths_are_kept(
    num_nodes: int, tokens: list[int], parents: list[int]
) -> None:
    assert nodes(candidates(TREE), num_nodes) == (tokens, parents)


def test_nobody_takes_the_place_of_a_node_that_does_not_exist() -> None:
    found = candidates(TREE, [True, True, False, True, True])
    assert nodes(found, 4) == ([99, 10, 11], [-1, 0, 0])


def test_a_certain_child_comes_after_its_parent() -> None:
    """With probability 1 it scores what its parent does."""
    found = candidates([(10, -1.0, -1), (11, -2.0, -1), (20, -1.0, 0), (21, -9.0, 0)])
    assert nodes(found, 2) == ([99, 10], [-1, 0])
    assert nodes(found, 3) == ([99, 10, 20], [-1, 0, 1])


def test_requests_differ_in_size() -> None:
    one = candidates(TREE)
    both = Candidates(
        *(getattr(one, name).repeat(2, 1) for name in Candidates.__dataclass_fields__)
    )
    selection = select(torch.tensor([[99], [98]]), both, [4, 2])
    assert selection.tokens_BN[0].tolist() == [99, 10, 20, 11]
    assert selection.parents_BN[0].tolist() == [-1, 0, 1, 0]
    assert selection.tokens_BN[1].tolist() == [98, 10, 0, 0]
    assert selection.parents_BN[1, :2].tolist() == [-1, 0]
    assert selection.candidates_BM[1].tolist() == [0, 5, 5]


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, float, int]]:
    """Level by level, with ties, and scores that fall along each path."""
    rows: list[tuple[int, float, int]] = []
    parents = [-1]
    for _ in range(draw(st.integers(1, 3))):
        level = []
        for parent in parents:
            above = rows[parent][1] if parent >= 0 else 0.0
            falls = sorted(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), max_size=3)))
            for fall in falls:
                level.append(len(rows))
                rows.append((len(rows), above - fall, parent))
        parents = level
    return rows


@given(rows=trees(), wanted=st.integers(1, 20))
@settings(max_examples=200)
def test_equals_taking_the_best_one_after_the_other(
    rows: list[tuple[int, float, int]], wanted: int
) -> None:
    if not rows:
        return
    count = min(wanted, len(rows) + 1)
    taken: list[int] = []
    while len(taken) < count - 1:
        reachable = [
            i
            for i, (_, _, parent) in enumerate(rows)
            if i not in taken and (parent < 0 or parent in taken)
        ]
        taken.append(max(reachable, key=lambda i: (rows[i][1], -i)))
    tokens, parents = nodes(candidates(rows), count)
    assert tokens == [ROOT, *(rows[i][0] for i in taken)]
    assert parents == [-1, *(taken.index(p) + 1 if (p := rows[i][2]) >= 0 else 0 for i in taken)]


def test_best_prefers_the_first_among_equals() -> None:
    assert best(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), 3).tolist() == [[1, 2, 0]]
