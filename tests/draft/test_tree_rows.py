"""Trees grown by kernels against those that draft/tree.py grows, on the same logits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.draft.choice import DraftChoice, rank_scores
from specengine.draft.tree import Growth
from specengine.kernels.tree_build import DraftTree, tree_build
from specengine.kernels.tree_step import Beams, Found, tree_step
from tests.draft.drafting import request

VOCAB, DRAFT_VOCAB = 60, 12


def logits_of(batch_size: int, topk: int, steps: int, seed: int) -> list[Tensor]:
    """[B, K, V] of each level. Rows are permutations of the same few values: no ties within a row,
    many between paths."""
    torch.manual_seed(seed)
    values = torch.linspace(-2.0, 3.0, DRAFT_VOCAB)
    size = batch_size, topk, DRAFT_VOCAB
    return [values[torch.rand(size).argsort(-1)] for _ in range(steps)]


def grow_by_host(
    levels: list[Tensor], roots: Tensor, ids: Tensor, nodes: int, static: bool
) -> DraftProposal:
    batch_size, topk, _ = levels[0].shape
    sampling = SamplingBatch.from_reqs([request([1])] * batch_size, VOCAB, roots.device)
    choice = DraftChoice(sampling, ids, by_rank=static)
    growth = Growth(roots[:, None], [len(levels)] * batch_size, topk, choice)
    growth.branch(levels[0][:, 0])
    for level in levels[1:]:
        growth.descend(None)
        growth.branch(level.flatten(0, 1))
    return growth.proposal([nodes] * batch_size)


def grow_by_kernels(
    levels: list[Tensor], roots: Tensor, ids: Tensor, nodes: int, static: bool
) -> DraftTree:
    batch_size, topk, _ = levels[0].shape
    found = Found.of(batch_size, topk, len(levels), roots.device)
    counters = torch.zeros(batch_size, dtype=torch.int32)
    ranks = rank_scores(torch.empty(1, topk))[0] if static else None
    beams: Beams | None = None
    for level in levels:
        rows = level[:, 0] if beams is None else level.flatten(0, 1)
        beams = tree_step(rows, beams, found, topk, counters, ids, ranks)
    return tree_build(roots, found, nodes, len(levels))


@given(
    batch_size=st.integers(1, 3),
    topk=st.integers(2, 5),
    steps=st.integers(1, 4),
    share=st.floats(0.0, 1.0),
    static=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
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
