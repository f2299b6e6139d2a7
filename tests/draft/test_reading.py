"""What a drafter of text has not read yet, against prompt and output as one."""

from __future__ import annotations

import pytest

from specengine.draft.reading import unread
from tests.support.draft_batches import request


@pytest.mark.parametrize("known", range(10))
@pytest.mark.parametrize("most", [None, 0, 1, 3, 20])
def test_it_is_what_comes_behind(known: int, most: int | None) -> None:
    """From inside the prompt, its end, inside the output, and the end of all."""
    req = request([0, 1, 2, 3, 4], [5, 6, 7, 8])
    assert unread(req, known, most) == list(range(known, 9))[:most]
