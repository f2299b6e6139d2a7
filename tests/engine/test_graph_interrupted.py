"""A capture that fails halfway, after which the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, make


@pytest.mark.skipif(torch.cuda.is_available(), reason="fails where functions stand for graphs")
def test_the_rounds_after_it_read_what_was_decided(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before a capture has taken a turn that no replay took."""
    (expected,) = make(target, None, disable_cuda_graph=True).generate(PROMPTS[:1], GREEDY)
    llm = make(target, None)
    flying = let_fly(llm, monkeypatch)
    llm.generate(PROMPTS[:1], GREEDY)

    def fail(run: Callable[[], object], pool: Any) -> Any:
        run()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specengine.engine.graph_round.capture", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    (found,) = llm.generate(PROMPTS[:1], GREEDY)
    assert flying.counters["captures"] == 1
    assert found.token_ids == expected.token_ids
