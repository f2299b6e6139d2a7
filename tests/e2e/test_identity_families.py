"""Each family drafted for by a random EAGLE-3 says what it says alone, from the same features as
transformers has hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.draft import eagle_checkpoints as checkpoints
from tests.support.families import FAMILIES, reference_model
from tests.target.conftest import MiniRunner

NEW_TOKENS = 32
PROMPTS = ["The quick brown fox", "x", "to be or not to be, that is the question: to be " * 2]
# Norms around, side by side, and behind alone; the others are for make test-all.
ALWAYS = ("gemma2", "cohere2", "olmo3")
CASES = [
    pytest.param(family, marks=() if family in ALWAYS else (pytest.mark.slow,))
    for family in FAMILIES
]


def run(folder: Path, spec: SpecConfig | None) -> list[list[int]]:
    llm = LLM(str(folder), spec, dtype="float32", max_total_tokens=4096)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = [one.token_ids for one in llm.generate(PROMPTS, params)]
    llm.engine.scheduler.check_invariant()
    if spec is not None:
        assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0
    return outputs


@pytest.mark.parametrize("family", CASES)
def test_random_eagle3_changes_no_token(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    target = small_models[family]
    draft = checkpoints.eagle3(tmp_path / "draft", target)
    spec = SpecConfig(
        algorithm="EAGLE3",
        adaptive=False,
        draft_model_path=str(draft),
        num_steps=3,
        eagle_topk=3,
        num_draft_tokens=12,
    )
    assert run(target, spec) == run(target, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_of_transformers(
    family: str, small_models: dict[str, Path]
) -> None:
    folder, tokens = small_models[family], [(7 * i * i + 3 * i) % 300 for i in range(60)]
    with torch.no_grad():
        given = torch.tensor([tokens])
        states = reference_model(folder, family)(given, output_hidden_states=True).hidden_states
    source = resolve_model(ModelConfig(model=str(folder)))
    model: Any = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    batch = MiniRunner(model).batch(ForwardMode.EXTEND, [tokens])
    batch.feature_layers = (0, 1)
    with torch.no_grad():
        model(batch.input_ids, batch.positions, batch)
    for layer, found in zip(batch.feature_layers, batch.layer_features, strict=True):
        expected = states[1 + layer][0]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
