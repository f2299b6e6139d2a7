"""The field `speculative`: how far a request may be drafted for."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.errors import RequestError
from specengine.core.sampling import SamplingParams, SpecControl

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": "fake", "prompt": "hi"},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "control"),
    [
        (None, SpecControl()),
        ({}, SpecControl()),
        ({"enabled": False}, SpecControl(enabled=False)),
        ({"enabled": None, "num_steps": 2}, SpecControl(num_steps=2)),
        ({"enabled": True, "num_steps": None}, SpecControl()),
    ],
    ids=str,
)
def test_what_is_asked_for(
    site: Any, engine: Any, path: str, field: Any, control: SpecControl
) -> None:
    assert site.post(path, **BODIES[path], speculative=field).status_code == 200
    assert engine.samplings[-1].speculative == control


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"num_steps": 0}, "speculative.num_steps", "at least 1, got 0"),
        ({"num_steps": 1.5}, "speculative.num_steps", "valid integer"),
        ({"num_steps": True}, "speculative.num_steps", "valid integer"),
        ({"enabled": "no"}, "speculative.enabled", "valid boolean"),
        ({"topk": 2}, "speculative.topk", "not a parameter"),
        (False, "speculative", "valid dictionary"),
    ],
    ids=str,
)
def test_what_is_refused(site: Any, path: str, field: Any, param: str, message: str) -> None:
    error = site.refusal(path, 400, **BODIES[path], speculative=field)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"enabled": None}, "speculative.enabled"),
        ({"num_steps": 0}, "speculative.num_steps"),
        ({"num_steps": True}, "speculative.num_steps"),
    ],
)
def test_what_python_is_refused(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SpecControl(**values)
    assert caught.value.param == param


def test_the_parameter_is_a_control() -> None:
    nothing: Any = {"enabled": False}
    with pytest.raises(RequestError, match="must be a SpecControl"):
        SamplingParams(speculative=nothing)
