"""The distribution of accepted tokens, told from what a trace holds, is that of the rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specengine.core.config import SpecConfig
from specengine.core.spec import DraftProposal
from specengine.draft.replay.chances import accepted_chances
from specengine.draft.replay.requests import RecordedDraft
from specengine.engine.factories import make_registered
from specengine.engine.tracing.weights import weigh
from tests.target.verify_world import TableTarget, decode_batch, propose, request

VOCAB = 7
TREE = ([3, 5, 1, 2, 4], [0, 0, 1, 1, 2])  # two below the root, two below the first, one below
CHAIN = ([3, 5, 2], [0, 1, 2])
TIMES = 4000


def sampled(draft: tuple[list[int], list[int]], times: int) -> DraftProposal:
    """The same draft `times` over; siblings share a distribution."""
    proposal = propose([1] * times, [draft] * times)
    generator = torch.Generator().manual_seed(5)
    of_parent = torch.rand(len(draft[0]) + 1, VOCAB, generator=generator) + 0.2
    rows = of_parent[torch.tensor([0, *draft[1]])]
    return replace(proposal, draft_probs=rows.expand(times, -1, -1).clone())


def recorded(draft: tuple[list[int], list[int]], temperature: float) -> RecordedDraft:
    proposal = sampled(draft, 1)
    batch = decode_batch([request(temperature=temperature)], VOCAB)
    weights = weigh(proposal, TableTarget(VOCAB)(batch, proposal), batch.sampling)
    return RecordedDraft(
        tokens=proposal.tokens[0].tolist(),
        parents=proposal.parents[0].tolist(),
        path_probs=weights.path_prob[0].tolist(),
        limit=10,
        accepted=0,
        target_probs=weights.target_prob[0].tolist(),
        draft_probs=weights.draft_prob[0].tolist(),
        chances=weights.chance[0].tolist(),
        missing=weights.missing[0].tolist(),
    )


def measured(draft: tuple[list[int], list[int]], verify: str, temperature: float) -> list[float]:
    """Shares of runs that accepted 0, 1, … tokens."""
    proposal = sampled(draft, TIMES)
    reqs = [request(seed, temperature=temperature) for seed in range(TIMES)]
    batch = decode_batch(reqs, VOCAB)
    verifier = make_registered(verify, SpecConfig())
    result = verifier.accept(TableTarget(VOCAB)(batch, proposal), batch, proposal)
    counts: list[float] = (np.bincount(result.num_accepted, minlength=4) / TIMES).tolist()
    return counts


@pytest.mark.parametrize(
    ("draft", "verify"),
    [
        (CHAIN, "rejection"),
        (CHAIN, "block"),
        (CHAIN, "sibling"),
        (CHAIN, "match"),
        (CHAIN, "target_only"),
        (TREE, "sibling"),
        (TREE, "match"),
        (TREE, "target_only"),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_chances_are_those_of_the_rule(
    draft: tuple[list[int], list[int]], verify: str, temperature: float
) -> None:
    """Within five standard deviations of each share."""
    name = "match" if verify == "target_only" else verify
    kept = range(1, len(draft[0]) + 1)
    told = accepted_chances(recorded(draft, temperature), kept, name)
    assert sum(told) == pytest.approx(1.0)
    told += [0.0] * (4 - len(told))
    for chance, share in zip(told, measured(draft, verify, temperature), strict=True):
        assert abs(chance - share) <= 5 * (chance * (1 - chance) / TIMES) ** 0.5 + 1e-6


@pytest.mark.parametrize("verify", ["rejection", "block", "sibling"])
def test_a_shorter_draft_is_told_from_the_longer(verify: str) -> None:
    shorter = ([3, 5], [0, 1])
    told = accepted_chances(recorded(CHAIN, 1.0), [1, 2], verify)
    assert told == pytest.approx(accepted_chances(recorded(shorter, 1.0), [1, 2], verify))


def test_block_verification_accepts_most() -> None:
    draft = recorded(CHAIN, 1.0)
    means = {}
    for verify in ("rejection", "block"):
        chances = accepted_chances(draft, [1, 2, 3], verify)
        means[verify] = sum(count * chance for count, chance in enumerate(chances))
    assert means["rejection"] < means["block"]


def test_recording_needs_no_padding() -> None:
    """Requests of different length: what lies past the last node is never read."""
    proposal = propose([1, 1], [CHAIN, ([3], [0])])
    batch = decode_batch([request(), request()], VOCAB)
    weights = weigh(proposal, TableTarget(VOCAB)(batch, proposal), batch.sampling)
    exists = ~weights.target_prob.isnan()
    assert exists.tolist() == [[False, True, True, True], [False, True, False, False]]
    assert weights.target_prob[1, 1] == weights.target_prob[0, 1]
