"""Growth of draft trees: Triton against PyTorch against the loop of the docstring."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.head.head_topk_ref import partials_of
from specengine.kernels.tree.tree_build import tree_build
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Beams, Drawn, Found, TreeLimits

STEPS = 3
RANKS = [0.0, -1.25, -2.5]


Given = tuple[Backend, int, int]
PLAIN: Given = ("torch", 0, 0)


@pytest.fixture(
    params=[PLAIN, ("torch", 3, 4), ("triton", 0, 0), ("triton", 1, 1), ("triton", 5, 3)],
    ids=lambda given: f"{given[0]}, {given[1] or 'no'} shares",
)
def by(request: pytest.FixtureRequest) -> Given:
    """The backend, how many shares of the logits it is told (0 is the logits themselves), and their
    width."""
    backend, num_blocks, width = request.param
    return backend, num_blocks, width


def grow(
    levels: list[Tensor],
    topk: int,
    by: Given,
    ids: Tensor | None = None,
    ranks: Tensor | None = None,
) -> tuple[Found, list[Beams]]:
    """levels: logits [B, K, V] of each; of the first only [:, 0] is read."""
    backend, num_blocks, width = by
    device, batch_size = levels[0].device, len(levels[0])
    found = Found.of(batch_size, topk, len(levels), device)
    counters = torch.zeros(batch_size, dtype=torch.int32, device=device)
    beams: Beams | None = None
    every: list[Beams] = []
    for level, logits_BKV in enumerate(levels):
        logits = logits_BKV[:, :1] if level == 0 else logits_BKV
        rows = logits.reshape(-1, logits.shape[2])
        told = partials_of(rows, topk, num_blocks, width) if num_blocks else rows
        beams = tree_step(told, beams, found, topk, counters, ids, ranks, backend=backend)
        every.append(beams)
    assert not counters.any()
    return found, every


def read_growth(
    levels: list[Tensor], topk: int, ids: list[int], ranks: list[float] | None
) -> tuple[list[list[tuple[int, float, int]]], list[list[list[int]]]]:
    """(token, score, parent) of all found, and the beams of each level, a request after another."""
    everything, picks = [], []
    for b in range(len(levels[0])):
        found: list[tuple[int, float, int]] = []
        beams, picked = [(-1, 0.0)], []
        for level in levels:
            first = len(found)
            for p, (candidate, score) in enumerate(beams):
                x = level[b, p].float().cpu()
                log_probs = (x - x.logsumexp(0)).tolist()
                best = sorted(range(len(x)), key=lambda v: (-float(x[v]), v))[:topk]
                for k, v in enumerate(best):
                    own = log_probs[v] if ranks is None else ranks[k]
                    found.append((ids[v], score + own, candidate))
            order = sorted(range(first, len(found)), key=lambda c: (-found[c][1], c))[:topk]
            beams = [(c, found[c][1]) for c in order]
            picked.append(order)
        everything.append(found)
        picks.append(picked)
    return everything, picks


def logits_of(batch_size: int, topk: int, cols: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(cols)
    return [torch.randn(batch_size, topk, cols, device=device) * 2 for _ in range(STEPS)]


@pytest.mark.parametrize("by_rank", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("batch_size", "topk", "cols"), [(1, 3, 1500), (3, 2, 70), (2, 3, 40)])
def test_the_loop(
    by: Given, batch_size: int, topk: int, cols: int, by_rank: bool, device: torch.device
) -> None:
    levels = logits_of(batch_size, topk, cols, device)
    ids = torch.randperm(5 * cols, device=device)[:cols]
    ranks = RANKS[:topk] if by_rank else None
    given = None if ranks is None else torch.tensor(ranks, device=device)
    found, every = grow(levels, topk, by, ids, given)
    expected, picks = read_growth(levels, topk, ids.tolist(), ranks)
    for b, rows in enumerate(expected):
        tokens, scores, parents = zip(*rows, strict=True)
        assert found.tokens_BC[b].tolist() == list(tokens)
        assert found.parents_BC[b].tolist() == list(parents)
        torch.testing.assert_close(found.scores_BC[b].cpu(), torch.tensor(scores))
        assert [beams.candidates_BK[b].tolist() for beams in every] == picks[b]


def test_beams_know_where_they_come_from(by: Given, device: torch.device) -> None:
    levels = logits_of(2, 3, 64, device)
    found, every = grow(levels, 3, by)
    for level, beams in enumerate(every):
        for b in range(2):
            chosen = beams.candidates_BK[b]
            assert torch.equal(beams.tokens_BK[b], found.tokens_BC[b, chosen])
            assert torch.equal(beams.scores_BK[b], found.scores_BC[b, chosen])
            for k, candidate in enumerate(chosen.tolist()):
                parent = int(found.parents_BC[b, candidate])
                before = every[level - 1].candidates_BK[b].tolist() if level else [-1]
                per_request = len(before)
                above = int(beams.above_T.view(2, 3)[b, k])
                assert above == b * per_request + before.index(parent)
        assert beams.depths_T.tolist() == [level] * 6
        assert beams.mask_BKN.shape == (2, 3, 3 * (level + 1))
        paths = paths_of(found, every[: level + 1])
        assert beams.mask_BKN.tolist() == paths


def paths_of(found: Found, every: list[Beams]) -> list[list[list[bool]]]:
    """Which beams of all levels lie on the paths of the last level's beams."""
    columns = torch.cat([beams.candidates_BK for beams in every], dim=1).tolist()
    parents = found.parents_BC.tolist()
    masks = []
    for b, chosen in enumerate(every[-1].candidates_BK.tolist()):
        rows = []
        for candidate in chosen:
            path = [candidate]
            while path[-1] >= 0:
                path.append(parents[b][path[-1]])
            rows.append([column in path for column in columns[b]])
        masks.append(rows)
    return masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_first_among_equals(by: Given, dtype: torch.dtype, device: torch.device) -> None:
    level = torch.zeros(1, 2, 1100, dtype=dtype, device=device)
    level[0, :, 1030:] = 1.0
    level[0, :, 7] = -0.0
    found, every = grow([level, level], 2, by)
    assert found.tokens_BC.tolist() == [[1030, 1031] * 3]
    assert found.parents_BC.tolist() == [[-1, -1, 0, 0, 1, 1]]
    assert every[1].candidates_BK.tolist() == [[2, 3]]


def test_tokens_that_cannot_be(by: Given, device: torch.device) -> None:
    level = torch.full((1, 2, 50), float("-inf"), device=device)
    level[0, :, 30] = 3.0
    level[0, :, 40] = -1e30
    found, _ = grow([level], 2, by)
    assert found.tokens_BC.tolist() == [[30, 40]]
    assert found.scores_BC[0, 0] == 0.0
    assert found.scores_BC[0, 1] < -1e29


def test_shares_that_have_seen_nothing(by: Given, device: torch.device) -> None:
    """Their sums of nothing must not count, however low the others are."""
    level = torch.full((1, 2, 2100), float("-inf"), device=device)
    level[0, :, 1500] = -300.0
    level[0, :, 1502] = -301.0
    found, _ = grow([level], 2, by)
    assert found.tokens_BC.tolist() == [[1500, 1502]]
    expected = torch.tensor([[0.0, -1.0]]).log_softmax(1)
    torch.testing.assert_close(found.scores_BC.cpu(), expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_tree_of_the_best(backend: Backend, device: torch.device) -> None:
    """
    9 ─┬─ 10 ─┬─ 20
       │      └─ 21
       └─ 11 ─── 22
    """
    found = Found(
        tokens_BC=torch.tensor([[10, 11, 20, 21, 22, 23]], device=device),
        scores_BC=torch.tensor([[-0.5, -1.0, -0.5, -2.0, -1.5, -3.0]], device=device),
        parents_BC=torch.tensor([[-1, -1, 0, 0, 1, 1]], device=device),
    )
    roots = torch.tensor([9], device=device)
    tree = tree_build(roots, found, 6, 2, backend=backend)
    assert tree.tokens_BN.tolist() == [[9, 10, 20, 11, 22, 21]], "of equals the parent comes first"
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 0, 3, 1]]
    assert tree.depths_BN.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.mask_BNN[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_smaller_trees_are_the_first_nodes_of_larger_ones(
    backend: Backend, device: torch.device
) -> None:
    found, _ = grow(logits_of(3, 3, 40, device), 3, PLAIN)
    found.scores_BC.copy_((found.scores_BC * 2).round() / 2)  # ties; no child outdoes its parent
    roots = torch.tensor([1, 2, 3], device=device)
    whole = tree_build(roots, found, 16, STEPS, backend=backend)
    for count in (2, 5, 8, 15):
        part = tree_build(roots, found, count, STEPS, backend=backend)
        for name in ("tokens_BN", "parents_BN", "depths_BN"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, :count]), name
        assert torch.equal(part.mask_BNN, whole.mask_BNN[:, :count, :count])


@pytest.mark.parametrize(("topk", "num_nodes"), [(2, 7), (4, 16), (3, 2), (4, 37)])
def test_trees_of_both_backends(topk: int, num_nodes: int, device: torch.device) -> None:
    num_nodes = min(num_nodes, 1 + topk + (STEPS - 1) * topk**2)
    found, _ = grow(logits_of(3, topk, 90, device), topk, PLAIN)
    roots = torch.tensor([1, 2, 3], device=device)
    expected = tree_build(roots, found, num_nodes, STEPS, backend="torch")
    tree = tree_build(roots, found, num_nodes, STEPS, backend="triton")
    for name in ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name


@pytest.mark.parametrize(("topk", "num_nodes"), [(2, 7), (4, 16), (3, 2), (4, 37)])
def test_limited_trees_of_both_backends(topk: int, num_nodes: int, device: torch.device) -> None:
    num_nodes = min(num_nodes, 1 + topk + (STEPS - 1) * topk**2)
    cases = list(product([1, 2, 3, 4, num_nodes, 99], range(STEPS + 1)))
    found, _ = grow(logits_of(len(cases), topk, 90, device), topk, PLAIN)
    found.scores_BC.copy_((found.scores_BC * 2).round() / 2)  # ties; no child outdoes its parent
    roots = torch.arange(len(cases), device=device)
    limits = TreeLimits(topk, *torch.tensor(cases, device=device).T.contiguous())
    given = roots, found, num_nodes, STEPS, limits
    expected = tree_build(*given, backend="torch")
    tree = tree_build(*given, backend="triton")
    for name in ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN", "candidates_BN"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    counts = (expected.parents_BN.cpu() != torch.arange(num_nodes)).sum(1)
    assert counts[: STEPS + 1].tolist() == [1] * (STEPS + 1)
    assert int(counts[-1]) == num_nodes


def test_children_that_were_drawn(by: Given, device: torch.device) -> None:
    """The second request and the third have drawn children; the first wants the best."""
    backend, num_blocks, width = by
    logits = logits_of(3, 3, 40, device)[1].flatten(0, 1)
    roots = torch.zeros(3, 40, device=device)
    found = Found.of(3, 3, 2, device)
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    scores = torch.tensor([-0.25, -1.5, -1.75], device=device)
    greedy = torch.tensor([True, False, False], device=device)
    drawn = Drawn(torch.arange(100, 109, device=device).view(3, 3), scores, greedy)
    drawn.tokens_TK[2, 1:] = -1
    told = partials_of(roots, 3, num_blocks, width) if num_blocks else roots
    given = told, None, found, 3, counters
    beams = tree_step(*given, drawn=drawn, backend=backend)
    best, _ = grow([roots[:, None].expand(-1, 3, -1)], 3, PLAIN)
    assert found.tokens_BC[:, :3].tolist() == [
        best.tokens_BC[0].tolist(),
        [103, 104, 105],
        [106, -1, -1],
    ]
    assert torch.allclose(found.scores_BC[0, :3], best.scores_BC[0])
    assert found.scores_BC[1:, :3].tolist() == [scores.tolist()] * 2
    assert beams.tokens_BK[1:].tolist() == [[103, 104, 105], [106, -1, -1]]
    lower = Drawn(torch.arange(200, 227, device=device).view(9, 3), scores, greedy)
    told = partials_of(logits, 3, num_blocks, width) if num_blocks else logits
    given = told, beams, found, 3, counters
    after = tree_step(*given, drawn=lower, backend=backend)
    assert found.tokens_BC[1, 3:].tolist() == list(range(209, 218))
    expected = scores[:, None] + scores
    assert found.scores_BC[2, 3:].tolist() == expected.flatten().tolist()
    assert found.parents_BC[1, 3:].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert after.tokens_BK[1:].tolist() == [[209, 210, 212], [218, 219, 221]]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nodes_without_a_token_are_left_out(backend: Backend, device: torch.device) -> None:
    """
    9 ─┬─ 10 ─┬─ 20
       │      └─ none
       └─ none ─┬─ none
                └─ none
    """
    found = Found(
        tokens_BC=torch.tensor([[10, -1, 20, -1, -1, -1]], device=device),
        scores_BC=torch.tensor([[-0.5, -1.0, -1.25, -2.0, -1.5, -3.0]], device=device),
        parents_BC=torch.tensor([[-1, -1, 0, 0, 1, 1]], device=device),
    )
    roots = torch.tensor([9], device=device)
    for nodes, tokens, candidates in (
        (6, [9, 10, 20, 0, 0, 0], [0, 0, 2, 0, 0, 0]),
        (3, [9, 10, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),  # no node moves up in place of the second
    ):
        limits = TreeLimits(2, roots.new_tensor([nodes]), roots.new_tensor([2]))
        tree = tree_build(roots, found, 6, 2, limits, backend=backend)
        assert tree.candidates_BN is not None
        assert tree.tokens_BN.tolist() == [tokens]
        assert tree.candidates_BN.tolist() == [candidates]
        parents = [-1, 0, 1 if nodes == 6 else 2, 3, 4, 5]
        assert tree.parents_BN.tolist() == [parents]
