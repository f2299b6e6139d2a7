"""Each body of the table, answered with drafts and without: the same answers.

The drafts are EAGLE-3's and of a fixed depth, so that they stand: with the adaptive choice this
small model would hardly be drafted for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specengine.core.config import SpecConfig
from tests.protocol.answers import Answers, ask, assert_same, flags_of, num_accepted, settled
from tests.protocol.table import cases
from tests.support.live_server import live_server
from tests.support.processes import serving

SPEC = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=4)
SPEC_FLAGS = ("--speculative-algorithm", "EAGLE3", "--no-speculative-adaptive")
NUM_STEPS = ("--speculative-num-steps", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("template")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    """Answers to all cases by name."""
    return answers_of_one_process(folder, None)


@pytest.fixture(scope="module", params=["one process", "several"])
def drafted(folder: Path, request: pytest.FixtureRequest) -> Answers:
    if request.param == "several":
        return answers_of_several(folder)
    return answers_of_one_process(folder, SPEC)


def answers_of_one_process(folder: Path, spec: SpecConfig | None) -> Answers:
    with live_server(flags_of(folder), spec) as live:
        return asyncio.run(ask(live.url))


def answers_of_several(folder: Path) -> Answers:
    """Front ends and the engine apart."""
    template = flags_of(folder)["chat_template"]
    flags = ("--chat-template", template, "--tool-call-parser", "hermes", "--api-workers", "2")
    with serving(folder, *flags, *SPEC_FLAGS, *NUM_STEPS) as served:
        return asyncio.run(ask(served.url))


def test_answers_are_the_same_with_drafts_that_stand(plain: Answers, drafted: Answers) -> None:
    """And a request limits its drafts: `speculative` is honoured. One test, so that one worker
    asks for the answers."""
    for case in cases():
        assert_same(settled(plain[case.name]), settled(drafted[case.name]), case.name)
        assert num_accepted(plain[case.name]) == 0, case.name
        assert num_accepted(drafted[case.name]) > 0, case.name
    limited = drafted["speculative /v1/completions"]["metrics"]["speculative_decoding"]
    free = drafted["model /v1/completions"]["metrics"]["speculative_decoding"]
    assert limited["num_accepted_draft_tokens"] <= limited["num_spec_steps"]
    assert free["num_accepted_draft_tokens"] > free["num_spec_steps"]
