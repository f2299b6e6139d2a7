"""What a round must be able to do, asked once for rounds of the same requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.engine.row_choices import BEST, Choosing, RowChoices, rows_of


def make_req(row: int, **options: Any) -> Req:
    return Req(str(row), [1, 2], SamplingParams(**options), req_pool_idx=row)


@pytest.fixture
def choices() -> RowChoices:
    return RowChoices(8, 100, 40, torch.device("cpu"))


def test_other_requests_are_asked_anew(choices: RowChoices) -> None:
    greedy, warm = make_req(1, temperature=0.0), make_req(2, temperature=0.7)
    logged = make_req(3, temperature=0.0, logprobs=0)
    for reqs in ([greedy], [greedy, warm], [greedy], [greedy, logged], [warm], [greedy]):
        assert choices.choosing_of(reqs) == Choosing.of(reqs)
        assert choices.choosing_of([*reqs]) == Choosing.of(reqs)


def test_edits_end_with_min_tokens(choices: RowChoices) -> None:
    reqs = [make_req(1, temperature=0.0, min_tokens=2), make_req(2, temperature=0.0)]
    for tokens, choosing in ((1, Choosing(True, True)), (1, BEST), (1, BEST)):
        for req in reqs:
            req.output_ids += [5] * tokens
        assert choices.choosing_of(reqs) == choosing


def test_who_has_no_row_has_no_round() -> None:
    reqs = [make_req(3), make_req(1)]
    assert rows_of(reqs) == [3, 1]
    reqs[1].req_pool_idx = None
    with pytest.raises(AssertionError, match="no row"):
        rows_of(reqs)
