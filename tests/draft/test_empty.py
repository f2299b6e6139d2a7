from __future__ import annotations

from specengine.core.drafter import Drafter
from specengine.draft.empty import EmptyDrafter
from tests.support.draft_batches import decode_batch, request


def test_proposes_the_last_tokens_alone() -> None:
    drafter: Drafter = EmptyDrafter()
    proposal = drafter.draft(decode_batch([request([1, 1, 1], [5]), request([2], [3, 4])]))
    assert proposal.tokens.tolist() == [[5], [4]]
    assert proposal.parents.tolist() == [[-1], [-1]]
    assert proposal.num_nodes == [1, 1]
    assert proposal.num_drafted == [0, 0]
    assert proposal.is_chain
