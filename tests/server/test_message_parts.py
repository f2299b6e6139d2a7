"""Messages in parts are text alone: what they may not be is named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specengine.server.messages import Message

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message(role="user", content=parts).content == "a\nb"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "named"),
    [(IMAGE, "of type image_url"), ({"type": "text"}, "of another form"), (3, "of another form")],
)
def test_other_parts_are_refused_by_their_type(part: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=f"parts {named} are not supported"):
        Message(role="user", content=[part])  # type: ignore[arg-type]
