"""Each family drafted for by a model says what transformers' model says, and has its hidden states
as features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.spec_totals import SpecTotals
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.draft import eagle_checkpoints as checkpoints
from tests.halves import slow_but
from tests.support.families import FAMILIES, assert_greedy, reference_model
from tests.target.conftest import MiniRunner

PROMPTS = ["The quick brown fox", "x", "to be or not to be, that is the question: to be " * 2]
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
CASES = list(FAMILIES)
CHAIN: dict[str, Any] = {"num_steps": 3}
TREE: dict[str, Any] = CHAIN | {"eagle_topk": 3, "num_draft_tokens": 12}


@dataclass(frozen=True)
class Family:
    folder: Path
    reference: Any  # transformers' model
    standalone: Path  # a draft: the same folder, or a Llama's


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Family:
    folder = small_models[request.param]
    reference = reference_model(folder, request.param)
    is_recurrent = "linear_attention" in (getattr(reference.config, "layer_types", None) or ())
    return Family(folder, reference, small_models["llama"] if is_recurrent else folder)


def said_by_both(family: Family, draft: Path, algorithm: str, **shape: Any) -> SpecTotals:
    """What drafts came to; tokens with them are transformers'."""
    spec = SpecConfig(algorithm=algorithm, adaptive=False, draft_model_path=str(draft), **shape)
    llm = LLM(str(family.folder), spec, dtype="float32", max_total_tokens=4096)
    for one in llm.generate(PROMPTS, PARAMS):
        assert len(one.token_ids) == PARAMS.max_tokens
        assert_greedy(family.reference, one.prompt_ids, one.token_ids)
    llm.engine.scheduler.check_invariant()
    return llm.engine.scheduler.spec_totals


@pytest.mark.parametrize("algorithm", slow_but(["EAGLE3"], checkpoints.RANDOM))
def test_random_drafts_change_no_token(family: Family, algorithm: str, tmp_path: Path) -> None:
    draft = checkpoints.RANDOM[algorithm](tmp_path / "draft", family.folder)
    shape = CHAIN if algorithm == "DFLASH" else TREE
    assert said_by_both(family, draft, algorithm, **shape).num_draft_tokens > 0


@pytest.mark.slow
def test_standalone_changes_no_token_and_a_family_s_own_drafts_are_accepted(
    family: Family,
) -> None:
    """A Llama drafts for recurrent families, which STANDALONE refuses as drafts."""
    totals = said_by_both(family, family.standalone, "STANDALONE", **TREE)
    assert totals.num_draft_tokens > 0
    if family.standalone == family.folder:
        assert totals.num_accepted_tokens / totals.num_drafts > 0.5 * CHAIN["num_steps"]


def test_features_are_the_hidden_states_of_transformers(family: Family) -> None:
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(60)]
    with torch.no_grad():
        given = torch.tensor([tokens])
        states = family.reference(given, output_hidden_states=True).hidden_states
    source = resolve_model(ModelConfig(model=str(family.folder)))
    model: Any = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    batch = MiniRunner(model).batch(ForwardMode.EXTEND, [tokens])
    batch.feature_layers = (0, 1)
    with torch.no_grad():
        model(batch.input_ids, batch.positions, batch)
    for layer, found in zip(batch.feature_layers, batch.layer_features, strict=True):
        expected = states[1 + layer][0]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
