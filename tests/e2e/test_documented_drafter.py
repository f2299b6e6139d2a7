"""The drafter of docs/notes/write_a_drafter.md works as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine import registry

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "write_a_drafter.md"
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file and line, put where the page says."""
    code, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    entry: dict[str, Any] = eval("{" + line + "}", names)
    monkeypatch.setattr(registry, "DRAFTERS", registry.DRAFTERS | entry)


@pytest.mark.usefixtures("echo")
def test_it_drafts_and_changes_nothing(small_models: dict[str, Path]) -> None:
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048}
    prompts = ["abcabcabc", "x", "to be or not to be"]
    plain = LLM(str(small_models["llama"]), **flags).generate(prompts, PARAMS)
    spec = SpecConfig(algorithm="ECHO", adaptive=False, num_draft_tokens=4)
    llm = LLM(str(small_models["llama"]), spec=spec, **flags)
    assert [one.token_ids for one in llm.generate(prompts, PARAMS)] == [
        one.token_ids for one in plain
    ]
    assert llm.engine.stats().spec.num_accepted_tokens > 0
