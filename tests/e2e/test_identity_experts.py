"""Families with mixtures of experts, drafted for by a model: no token changes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.registry import MODEL_FAMILIES, load_place
from specengine.layers.quantization import linears
from tests.draft.eagle_checkpoints import eagle3
from tests.halves import slow_but
from tests.support.drafting import DRAFTS, drafting
from tests.support.families import FAMILIES, has_experts, small_config
from tests.target.test_experts_families import in_mxfp4

NEW_TOKENS = 14
PROMPTS = ["The quick brown fox", "0123456789" * 9, "x"]


WITH_EXPERTS = [family for family in FAMILIES if has_experts(family)]


def greedy(folder: Path, spec: SpecConfig | None = None, **flags: Any) -> list[list[int]]:
    llm = LLM(str(folder), spec, dtype="float32", max_total_tokens=4096, **flags)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    found = [one.token_ids for one in llm.generate(PROMPTS, params)]
    llm.engine.scheduler.check_invariant()
    return found


# Each kind of layer, way to choose experts and shape of drafts. With drafts of text every
# family is compared with transformers in make test (tests/e2e/test_identity.py).
FAST = [("qwen3next", 1), ("gptoss", 3), ("deepseekv3", 1), ("llama4", 1), ("minimaxm2", 3)]


@pytest.mark.parametrize(("family", "topk"), slow_but(FAST, product(WITH_EXPERTS, [1, 3])))
def test_random_eagle3_changes_no_token(
    family: str, topk: int, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = small_models[family]
    draft = eagle3(tmp_path / "draft", folder, draft_vocab=200)
    spec = SpecConfig(
        algorithm="EAGLE3",
        adaptive=False,
        draft_model_path=str(draft),
        num_steps=3,
        eagle_topk=topk,
        num_draft_tokens=9 if topk > 1 else None,
    )
    assert greedy(folder, spec, chunked_prefill_size=16) == greedy(folder)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", DRAFTS)
def test_each_kind_of_drafts_changes_no_token_of_experts_in_mxfp4(
    drafts: str, small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stay so, as on a GPU."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    pair = in_mxfp4(tmp_path)
    for path in small_models["gptoss"].glob("*token*"):
        (pair.quantised / path.name).write_bytes(path.read_bytes())
    spec = drafting(drafts, pair.quantised, pair.dense, tmp_path)
    assert greedy(pair.quantised, spec, device="cpu") == greedy(pair.quantised, device="cpu")


@pytest.mark.slow
def test_families_with_experts_are_those_whose_layers_have_some() -> None:
    """That is, none is left out of the tests of WITH_EXPERTS."""
    layers = {one: load_place(MODEL_FAMILIES[name]).experts for one, name in FAMILIES.items()}
    assert [one for one in FAMILIES if any(layers[one](small_config(one)))] == WITH_EXPERTS


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_in_few_bits_answer(quantization: str, small_models: dict[str, Path]) -> None:
    """A CPU has such products of experts; a GPU has none, and refuses them."""
    folder = str(small_models["qwen3moe"])
    llm = LLM(folder, dtype="bfloat16", quantization=quantization, device="cpu")
    experts = llm.engine.parts.worker.runner.model.model.layers[0].mlp.experts
    assert experts.kernels is not None
    assert experts.gate_up is None
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert len(llm.generate(["x"], params)[0].token_ids) == 8
