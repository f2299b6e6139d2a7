"""Which verifier goes with which drafts."""

from __future__ import annotations

import pytest

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.registry import VERIFIERS
from specengine.draft.empty import EmptyDrafter
from specengine.engine.factories import make_verifier, registered_verifiers
from specengine.engine.proof.sampling_drafter import SamplingDrafter
from specengine.engine.proof.shapes import CHAIN, TREE
from specengine.engine.tracing.one_token import OneTokenVerifier

RULES = registered_verifiers()
CERTAIN = EmptyDrafter()
SAMPLED_CHAIN = SamplingDrafter(CHAIN, [1, 2, 3], 8, lambda req: 8)
SAMPLED_TREE = SamplingDrafter(TREE, [1, 2, 3], 8, lambda req: 8)


def test_auto() -> None:
    found = [type(make_verifier(SpecConfig(), d)) for d in (CERTAIN, SAMPLED_CHAIN, SAMPLED_TREE)]
    assert found == [type(RULES[name]) for name in ("match", "block", "sibling")]


@pytest.mark.parametrize("name", VERIFIERS)
def test_sampled_chains_may_be_judged_by_any(name: str) -> None:
    verifier = make_verifier(SpecConfig(verify=name), SAMPLED_CHAIN)
    assert type(verifier) is type(RULES[name])


@pytest.mark.parametrize("name", [n for n, one in RULES.items() if one.needs_draft_probs])
def test_rules_that_weigh_drafts_need_sampled_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-verify {name} .* use match, target_only"):
        make_verifier(SpecConfig(verify=name), CERTAIN)


@pytest.mark.parametrize("name", [n for n, one in RULES.items() if not one.takes_trees])
def test_rules_for_chains_refuse_trees(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-verify {name} verifies chains.*sibling"):
        make_verifier(SpecConfig(verify=name), SAMPLED_TREE)


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifier_of_traces_of_every_position_says_what_the_one_in_it_says(name: str) -> None:
    inner = RULES[name]
    assert OneTokenVerifier(inner).text_depends_on_drafts == inner.text_depends_on_drafts
