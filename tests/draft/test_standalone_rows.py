"""What a standalone draft model takes for run of its own drafts."""

from __future__ import annotations

import pytest
import torch

from specengine.draft.chain import chain_proposal
from specengine.draft.standalone.worker import _agreed


@pytest.mark.parametrize(
    ("emitted", "expected"), [([5, 6, 7, 9], 2), ([5, 6, 9], 2), ([5, 9], 1), ([9], 0)]
)
def test_the_last_draft_of_a_chain_was_never_run(emitted: list[int], expected: int) -> None:
    """Nor was the token that the target added."""
    proposal = chain_proposal(torch.tensor([[3, 5, 6, 7]]), [4], [])
    assert _agreed(proposal, [emitted]) == [expected]
