"""Every token that an engine emits was chosen by ModelRunner.sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specengine import SpecConfig
from specengine.runner.model_runner import ModelRunner
from tests.support.device_rounds import run_on_device
from tests.support.rounds import EDITED, GREEDY, ON_CPU, PROMPTS, SAMPLED, make


@ON_CPU
@pytest.mark.parametrize("verify", ["match", "relaxed"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_tokens_of_prefills_and_rounds_come_from_one_place(
    where: str,
    verify: str,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of drafts that were refused are among the chosen, so each output is a part of them."""
    chosen: list[int] = []
    inner = ModelRunner.sample

    def noted(self: ModelRunner, *given: Any, **named: Any) -> Tensor:
        tokens = inner(self, *given, **named)
        chosen.extend(tokens.tolist())
        return tokens

    monkeypatch.setattr(ModelRunner, "sample", noted)
    path = drafters["EAGLE3"]
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=path, num_steps=2, verify=verify)
    llm = make(target, spec, device="cpu")
    if where == "device":
        run_on_device(llm, sizes=(1,))
    for params in (GREEDY, SAMPLED[0], EDITED[1]):
        chosen.clear()
        (found,) = llm.generate(PROMPTS[:1], params)
        assert len(chosen) >= len(found.token_ids)
        rest = iter(chosen)
        if verify == "match":  # relaxed emits drafts that no sampling chose
            assert all(token in rest for token in found.token_ids), "in their order"
