"""The drafters of docs/extend/drafter.md work as the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.registry import DRAFTERS
from tests.support.device_rounds import make_on_device
from tests.support.rounds import WHERE

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "drafter.md"
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = ["abcabcabc", "0123", "to be or not to be"]
FLAGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code and lines, put where the page says."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = ModuleType("specengine.draft.echo")
    for block in blocks:
        if not block.startswith('"'):
            exec(block, vars(names))
    lines = "".join(block for block in blocks if block.startswith('"'))
    entries: dict[str, str] = eval("{" + lines + "}")
    assert entries.keys() == {"ECHO", "LOOKUP_ECHO", "DEVICE_ECHO", "SMALL_MODEL"}
    monkeypatch.setitem(sys.modules, names.__name__, names)
    for name, place in entries.items():
        monkeypatch.setitem(DRAFTERS, name, place)


def spec_of(name: str) -> SpecConfig:
    return SpecConfig(algorithm=name, adaptive=False, num_draft_tokens=5)


@pytest.mark.parametrize("name", ["ECHO", "LOOKUP_ECHO", "DEVICE_ECHO"])
def test_documented_drafter_changes_no_token(name: str, small_models: dict[str, Path]) -> None:
    folder = str(small_models["llama"])
    plain = LLM(folder, **FLAGS).generate(PROMPTS, PARAMS)
    llm = LLM(folder, spec=spec_of(name), **FLAGS)
    found = llm.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert llm.engine.stats().spec.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["LOOKUP_ECHO", "DEVICE_ECHO"])
@pytest.mark.parametrize("where", WHERE)
def test_documented_device_drafter_drafts_in_device_rounds_what_it_does_on_the_host(
    where: str, name: str, small_models: dict[str, Path]
) -> None:
    folder = small_models["llama"]
    host = LLM(str(folder), spec=spec_of("ECHO"), disable_cuda_graph=True, **FLAGS)
    llm, rounds = make_on_device(where, folder, spec_of(name), **FLAGS)
    for _ in range(2):  # the second time on prefix hits
        found, expected = (one.generate(PROMPTS, PARAMS) for one in (llm, host))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.spec.histogram for one in found] == [one.spec.histogram for one in expected]
    assert set(rounds.counters) == {"captures", "replays"}, "no round ran on the host"
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 0
    if name == "DEVICE_ECHO":
        drafter: Any = llm.engine.drafter
        assert torch.count_nonzero(drafter.texts)


@pytest.mark.parametrize("where", WHERE)
def test_documented_model_drafter_with_the_target_as_its_model_is_right_in_all_rounds(
    where: str, small_models: dict[str, Path]
) -> None:
    """A row that it lacks, or ran on another token, would spoil drafts."""
    folder = small_models["llama"]
    options: dict[str, Any] = {"num_steps": 4, "draft_model_path": str(folder)}
    spec = SpecConfig(algorithm="SMALL_MODEL", adaptive=False, **options)
    plain = LLM(str(folder), **FLAGS).generate(PROMPTS, PARAMS)
    host = LLM(str(folder), spec=spec, disable_cuda_graph=True, **FLAGS)
    llm, rounds = make_on_device(where, folder, spec, **FLAGS)
    for _ in range(2):  # the second time on prefix hits
        for one in (host, llm):
            found = one.generate(PROMPTS, PARAMS)
            assert [gen.token_ids for gen in found] == [gen.token_ids for gen in plain]
            assert [gen.spec.histogram for gen in found] == [[0, 0, 0, 1, 7]] * len(PROMPTS)
    assert set(rounds.counters) == {"captures", "replays"}, "no round ran on the host"


def test_page_names_every_field_of_a_drafter() -> None:
    text = PAGE.read_text()
    assert [name for name in vars(Drafter)["__annotations__"] if f"`{name}" not in text] == []
