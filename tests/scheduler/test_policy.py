from __future__ import annotations

import pytest

from specengine.core.request import Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.scheduler.policy import SchedulePolicy


@pytest.mark.parametrize("max_tokens", [None, 1, 4, 5, 6, 30])
@pytest.mark.parametrize("num_output", [0, 4])
@pytest.mark.parametrize("context_len", [13, 14, 15, 16, 90])
def test_who_goes_on_has_more_than_one_token_left(
    max_tokens: int | None, num_output: int, context_len: int
) -> None:
    policy = SchedulePolicy(
        context_len=context_len, max_running_requests=1, chunked_prefill_size=-1
    )
    req = Req("r", [1] * 10, SamplingParams(max_tokens=max_tokens))
    req.output_ids += [2] * num_output
    assert policy.going_on([req]) == ([req] if policy.remaining_tokens(req) > 1 else [])
    req.state = ReqState.FINISHED
    assert policy.going_on([req]) == []
