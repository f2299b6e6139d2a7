"""Trees expanded by kernels against those of draft/tree.py, on the same logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.draft.choice import DraftChoice, rank_scores
from specengine.draft.tree import Growth
from specengine.engine.draft_depth import cut_to_depth
from specengine.kernels.dispatch import Backend
from specengine.kernels.tree.tree_build import tree_build
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Beams, DraftTree, Found, TreeLimits
from tests.support.draft_batches import request

VOCAB, DRAFT_VOCAB = 60, 12


def logits_of(batch_size: int, topk: int, steps: int, seed: int) -> list[Tensor]:
    """[B, K, V] of each level. Rows are permutations of the same few values: no ties within a row,
    many between paths."""
    torch.manual_seed(seed)
    values = torch.linspace(-2.0, 3.0, DRAFT_VOCAB)
    size = batch_size, topk, DRAFT_VOCAB
    return [values[torch.rand(size).argsort(-1)] for _ in range(steps)]


def grow_by_host(
    levels: list[Tensor],
    roots: Tensor,
    ids: Tensor,
    nodes: int,
    static: bool,
    most: list[int] | None = None,
) -> DraftProposal:
    """most: nodes of each request, root included."""
    batch_size, topk, _ = levels[0].shape
    most = [nodes] * batch_size if most is None else [min(nodes, one) for one in most]
    sampling = SamplingBatch.from_reqs([request([1])] * batch_size, VOCAB, roots.device)
    choice = DraftChoice(sampling, ids, by_rank=static)
    depths = [min(len(levels), one - 1) for one in most]
    growth = Growth(roots[:, None], depths, topk, choice)
    growth.branch(levels[0][:, 0])
    for level in levels[1:]:
        growth.descend(None)
        growth.branch(level.flatten(0, 1))
    return growth.proposal(most)


def grow_by_kernels(
    levels: list[Tensor],
    roots: Tensor,
    ids: Tensor,
    nodes: int,
    static: bool,
    limits: TreeLimits | None = None,
    backend: Backend = "torch",
) -> DraftTree:
    batch_size, topk, _ = levels[0].shape
    found = Found.of(batch_size, topk, len(levels), roots.device)
    counters = torch.zeros(batch_size, dtype=torch.int32)
    ranks = rank_scores(torch.empty(1, topk))[0] if static else None
    beams: Beams | None = None
    for level in levels:
        rows = level[:, 0] if beams is None else level.flatten(0, 1)
        beams = tree_step(rows, beams, found, topk, counters, ids, ranks)
    return tree_build(roots, found, nodes, len(levels), limits, backend=backend)


@given(
    batch_size=st.integers(1, 3),
    topk=st.integers(2, 5),
    steps=st.integers(1, 4),
    share=st.floats(0.0, 1.0),
    static=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_trees_of_the_host(
    batch_size: int, topk: int, steps: int, share: float, static: bool, seed: int
) -> None:
    most = 1 + topk + (steps - 1) * topk**2
    nodes = 2 + round(share * (most - 2))
    levels = logits_of(batch_size, topk, steps, seed)
    roots, ids = torch.arange(batch_size), torch.randperm(VOCAB)[:DRAFT_VOCAB]
    expected = grow_by_host(levels, roots, ids, nodes, static)
    tree = grow_by_kernels(levels, roots, ids, nodes, static)
    assert expected.num_nodes == [nodes] * batch_size
    assert torch.equal(tree.tokens_BN, expected.tokens)
    assert torch.equal(tree.parents_BN, expected.parents)
    assert expected.ranks == [range(nodes)] * batch_size
    if expected.confidence is not None:
        assert (expected.confidence.diff(dim=1) <= 0).all(), "the first n nodes are the best n"


def check_limited(
    drawn: st.DataObject, backend: Backend, batch_size: int, topk: int, steps: int
) -> None:
    """Trees of requests that may emit so many more tokens, and want no deeper drafts."""
    nodes = drawn.draw(st.integers(2, 1 + topk + (steps - 1) * topk**2))
    most = drawn.draw(st.lists(st.integers(1, nodes + 2), min_size=batch_size, max_size=batch_size))
    depths = drawn.draw(st.lists(st.integers(0, steps), min_size=batch_size, max_size=batch_size))
    static, seed = drawn.draw(st.booleans()), drawn.draw(st.integers(0, 2**32 - 1))
    levels = logits_of(batch_size, topk, steps, seed)
    roots, ids = torch.arange(batch_size) + 1, torch.randperm(VOCAB)[:DRAFT_VOCAB] + 9
    limits = TreeLimits(topk, torch.tensor(most), torch.tensor(depths))
    tree = grow_by_kernels(levels, roots, ids, nodes, static, limits, backend)
    if max(most) == 1:
        counts = [1] * batch_size
    else:
        proposal = grow_by_host(levels, roots, ids, nodes, static, most)
        expected = cut_to_depth(proposal, depths)
        counts = expected.num_nodes
    for b, count in enumerate(counts):
        if count > 1:
            assert tree.tokens_BN[b, :count].tolist() == expected.tokens[b, :count].tolist()
            assert tree.parents_BN[b, :count].tolist() == expected.parents[b, :count].tolist()
        assert tree.tokens_BN[b, 0] == roots[b]
        assert tree.parents_BN[b, 0] == -1
        assert tree.tokens_BN[b, count:].tolist() == [0] * (nodes - count)
        assert tree.parents_BN[b, count:].tolist() == list(range(count, nodes))
        seen = tree.mask_BNN[b, count:].nonzero()[:, 1]
        assert seen.tolist() == list(range(count, nodes)), "what is missing sees itself alone"
        assert tree.depths_BN[b, count:].tolist() == [steps] * (nodes - count)
        assert tree.depths_BN[b, :count].tolist() == (tree.mask_BNN[b, :count].sum(1) - 1).tolist()


@given(st.data(), st.integers(1, 4), st.integers(2, 5), st.integers(1, 4))
@settings(max_examples=200)
def test_limited_trees_of_the_host(
    drawn: st.DataObject, batch_size: int, topk: int, steps: int
) -> None:
    check_limited(drawn, "torch", batch_size, topk, steps)


@given(st.data())
@settings(max_examples=25)
def test_limited_trees_of_the_kernel(drawn: st.DataObject) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tensors lie on the CPU")
    check_limited(drawn, "triton", *drawn.draw(st.sampled_from([(3, 2, 3), (2, 4, 2), (1, 3, 4)])))
