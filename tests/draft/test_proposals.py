from __future__ import annotations

import pytest
import torch

from specengine.draft.proposals import Draft, assemble


def test_chains_of_different_length() -> None:
    proposal = assemble([Draft([5, 6, 7], None, [1.0, 0.5, 0.25]), Draft([8], None, [1.0])])
    assert proposal.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert proposal.parents.tolist() == [[-1, 0, 1]] * 2
    assert proposal.num_nodes == [3, 1]
    assert proposal.is_chain
    assert proposal.confidence is not None
    assert proposal.confidence.tolist() == [[1.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    assert (proposal.tokens.dtype, proposal.parents.dtype) == (torch.int64, torch.int64)
    assert proposal.confidence.dtype == torch.float32


def test_a_tree_beside_a_chain() -> None:
    proposal = assemble([Draft([5, 6, 7], [-1, 0, 0]), Draft([8, 9])])
    assert not proposal.is_chain
    assert proposal.parents.tolist() == [[-1, 0, 0], [-1, 0, 0]]
    assert proposal.num_nodes == [3, 2]


def test_confidence_of_all_or_none() -> None:
    assert assemble([Draft([5], None, [1.0]), Draft([8])]).confidence is None


def test_expected_tokens() -> None:
    assert Draft([1, 2, 3], None, [1.0, 0.5, 0.25]).num_expected == pytest.approx(0.75)
    assert Draft([1, 2, 3]).num_expected == 0.0
