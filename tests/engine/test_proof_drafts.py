"""What a log of drafts says of those that are drawn as reported, and of others."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.spec import DraftProposal
from specengine.engine.proof.draft_log import DraftLog

SIZE = 6000


def siblings(probs_BV: Tensor, tokens_B2: Tensor) -> DraftProposal:
    """Two children of each root, drawn from one row."""
    tokens_BN = torch.cat([torch.zeros(SIZE, 1, dtype=torch.int64), tokens_B2], dim=1)
    parents_BN = torch.tensor([[-1, 0, 0]]).expand(SIZE, -1)
    probs_BNV = probs_BV[:, None].expand(-1, 3, -1)
    return DraftProposal(tokens_BN, parents_BN, [3] * SIZE, False, draft_probs=probs_BNV)


def p_value(proposal: DraftProposal) -> float:
    log = DraftLog()
    log.note(proposal)
    return log.p_value


def test_siblings_are_drawn_without_replacement() -> None:
    torch.manual_seed(0)
    probs_BV = torch.randn(SIZE, 5).softmax(-1)
    drawn_B2 = torch.multinomial(probs_BV, 2)
    assert p_value(siblings(probs_BV, drawn_B2)) > 1e-3
    assert p_value(siblings(probs_BV, drawn_B2.flip(1))) < 1e-9
    assert p_value(siblings(probs_BV.roll(1, 0), drawn_B2)) < 1e-9
    again_B2 = torch.multinomial(probs_BV, 2, replacement=True)
    assert p_value(siblings(probs_BV, again_B2)) == 0.0, "the same token twice"


def test_what_does_not_exist_is_not_read() -> None:
    torch.manual_seed(0)
    probs_BV = torch.randn(SIZE, 5).softmax(-1)
    first_B1 = torch.multinomial(probs_BV, 1)
    proposal = siblings(probs_BV, torch.cat([first_B1, first_B1], dim=1))
    proposal.num_nodes[:] = [2] * SIZE
    log = DraftLog()
    log.note(proposal)
    assert (log.num_drafts, log.num_impossible) == (SIZE, 0)
    assert log.p_value > 1e-3


def test_draft_that_its_report_gives_no_chance_fails_a_log_that_fits_else() -> None:
    draw = torch.Generator().manual_seed(0)
    drawn_B2 = torch.rand(SIZE, 5, generator=draw).argsort(1)[:, :2]
    proposal = siblings(torch.full((SIZE, 5), 0.2), drawn_B2)
    assert p_value(proposal) > 1e-3
    assert proposal.draft_probs is not None
    proposal.draft_probs = proposal.draft_probs.clone()
    proposal.draft_probs[0, 1, drawn_B2[0, 0]] = 0.0
    log = DraftLog()
    log.note(proposal)
    assert (log.num_drafts, log.num_impossible, log.p_value) == (2 * SIZE, 1, 0.0)


def test_a_log_of_nothing_fails() -> None:
    assert DraftLog().p_value == 0.0
