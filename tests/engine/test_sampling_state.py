"""What a round must be able to do, found once for rounds of the same requests."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.engine.round import shared
from specengine.engine.round.sampling import PLAIN, SamplingFeatures, SamplingState, rows_of


def make_req(row: int, **options: Any) -> Req:
    return Req(str(row), [1, 2], SamplingParams(**options), req_pool_idx=row)


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(8, 100, 40, torch.device("cpu"))


def test_features_of_other_requests_are_found_anew(state: SamplingState) -> None:
    greedy, warm = make_req(1, temperature=0.0), make_req(2, temperature=0.7)
    logged = make_req(3, temperature=0.0, logprobs=0)
    samples, logprobs = SamplingFeatures(samples=True), SamplingFeatures(True, logprobs=True)
    for reqs, features in (
        ([greedy], PLAIN),
        ([greedy, warm], samples),
        ([greedy], PLAIN),
        ([greedy, logged], logprobs),
        ([warm], samples),
    ):
        assert state.features_of(reqs) == features
        assert state.features_of([*reqs]) == features


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("greedy_too", [False, True])
def test_stochastic_rule_decides_where_a_request_samples(
    stochastic: bool, greedy_too: bool
) -> None:
    """And for greedy requests under rules that say so."""
    state = SamplingState(8, 100, 40, torch.device("cpu"), stochastic, greedy_too)
    greedy, warm = make_req(1, temperature=0.0), make_req(2, temperature=0.7)
    assert state.features_of([greedy]) == state.greedy == SamplingFeatures(stochastic=greedy_too)
    expected = SamplingFeatures(samples=True, stochastic=stochastic)
    assert state.features_of([greedy, warm]) == state.sampled == expected


def test_edits_end_with_min_tokens(state: SamplingState) -> None:
    reqs = [make_req(1, temperature=0.0, min_tokens=2), make_req(2, temperature=0.0)]
    for tokens, features in ((1, SamplingFeatures(True, True)), (1, PLAIN), (1, PLAIN)):
        for req in reqs:
            req.output_ids += [5] * tokens
        assert state.features_of(reqs) == features


def test_request_without_a_row_has_no_round() -> None:
    reqs = [make_req(3), make_req(1)]
    assert rows_of(reqs) == [3, 1]
    reqs[1].req_pool_idx = None
    with pytest.raises(AssertionError, match="no row"):
        rows_of(reqs)


class SixFeatures(NamedTuple):
    first: bool
    second: bool
    third: bool
    fourth: bool
    fifth: bool
    sixth: bool


@pytest.mark.parametrize("kind", [SamplingFeatures, SixFeatures])
def test_all_features_are_told_to_engines_that_share_experts(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one integer."""
    monkeypatch.setattr(shared, "SamplingFeatures", kind)
    for flags in product((False, True), repeat=len(kind._fields)):
        assert shared._features_of(shared._code_of(kind(*flags))) == flags
