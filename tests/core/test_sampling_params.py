from __future__ import annotations

import math
from typing import Any

import pytest

from specengine.core.errors import RequestError
from specengine.core.sampling import SamplingParams

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", HUGE),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 2.5),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e9),
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", 3),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [1, 2]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"top_p": 1e-300},
        {"top_k": HUGE},
        {"top_k": -1},
        {"min_tokens": HUGE, "max_tokens": None},
        {"seed": -(2**63)},
        {"stop": "end"},
        {"stop": None, "logit_bias": None, "stop_token_ids": None},
        {"logit_bias": {5: -100.0}},
        {"logprobs": 20},
    ],
)
def test_extremes_that_can_be_honoured(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert isinstance(params.stop, tuple)
    assert isinstance(params.logit_bias, dict)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_token_ids_outside_the_vocabulary(name: str) -> None:
    value: Any = (3, 10) if name == "stop_token_ids" else {3: 1.0, 10: 1.0}
    params = SamplingParams(**{name: value})
    params.check_vocab(11)
    with pytest.raises(RequestError, match=r"token 10 is outside the vocabulary \(0\.\.9\)") as e:
        params.check_vocab(10)
    assert e.value.param == name


def test_min_tokens_must_leave_a_token() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(9)))
    params.check_vocab(11)
    with pytest.raises(RequestError, match="no token to choose"):
        params.check_vocab(10)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [({"temperature": 0.0}, True), ({"top_k": 1}, True), ({"temperature": 1e-9}, False)],
)
def test_what_is_greedy(options: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**options).is_greedy is greedy
