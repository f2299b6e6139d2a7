"""Each body of the table, answered with drafts and without: the same answers.

The drafts are EAGLE-3's and of a fixed depth, so that they stand: with the adaptive choice this
small model would hardly be drafted for. A server of several processes is asked the same in
tests/e2e/hostile/test_hostile.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from specengine.core.config import SpecConfig
from tests.protocol.answers import Answers, ask, assert_drafts_change_nothing, flags_of
from tests.support.live_server import live_server

SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=4)


def answers(folder: Path, spec: SpecConfig | None) -> Answers:
    """To all cases, by name."""
    with live_server(flags_of(folder), spec) as live:
        return asyncio.run(ask(live.url))


def test_answers_are_the_same_with_drafts_that_stand(tmp_path: Path) -> None:
    assert_drafts_change_nothing(answers(tmp_path, None), answers(tmp_path, SPEC))
