"""MTP of Qwen3-Next: a layer with gated attention, experts and gains from 1, as transformers has
it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ModelLoadError
from tests.draft.test_mtp_model import TOKENS, Runner, assert_near, load_models
from tests.halves import each_value
from tests.support.device_rounds import run_on_device
from tests.support.families import reference_model, save_small_model

FAMILY = "qwen3next"
LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
PROMPTS = ["The quick brown fox", "to be or not to be, that is the question: to be " * 2]


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, which is the MTP layer, and whose final norm is that layer's."""
    return save_small_model(FAMILY, tmp_path_factory.mktemp("layer"), seed=9, **LAYER)


@pytest.fixture(scope="module")
def checkpoint(
    small_models: dict[str, Path], layer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    shutil.copytree(small_models[FAMILY], folder)
    tensors, own = load_file(folder / "model.safetensors"), load_file(layer / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name, tensor in own.items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.", "mtp.", 1)] = tensor
    tensors["mtp.norm.weight"] = own["model.norm.weight"]
    tensors["mtp.fc.weight"] = torch.randn(64, 128, generator=generator) * 0.1
    for kind in ("embedding", "hidden"):
        gain = torch.randn(64, generator=generator) * 0.2
        tensors[f"mtp.pre_fc_norm_{kind}.weight"] = gain
    save_file(tensors, folder / "model.safetensors")
    return folder


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + gain)


@torch.no_grad()
def test_states_and_logits_equal_transformers(
    checkpoint: Path, layer: Path, small_models: dict[str, Path]
) -> None:
    target = reference_model(small_models[FAMILY], FAMILY)
    hidden = target.model(torch.tensor([TOKENS[:-1]])).last_hidden_state[0]
    tensors = load_file(checkpoint / "model.safetensors")
    embedded = target.model.embed_tokens(torch.tensor(TOKENS[1:]))
    pair = [
        _normed(embedded, tensors["mtp.pre_fc_norm_embedding.weight"]),
        _normed(hidden, tensors["mtp.pre_fc_norm_hidden.weight"]),
    ]
    joined = torch.cat(pair, -1) @ tensors["mtp.fc.weight"].T
    alone: Any = reference_model(layer, FAMILY)
    expected = alone.model(inputs_embeds=joined[None]).last_hidden_state[0]
    [model] = load_models(checkpoint)
    states, logits = Runner(model)(TOKENS[1:], hidden)
    assert_near(states, expected)
    assert_near(logits, target.lm_head(expected))


PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 2048}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return [one.token_ids for one in LLM(str(checkpoint), **FLAGS).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(("topk", "on_device"), each_value(1, [1, 3], [False, True]))
def test_its_drafts_change_no_token(
    topk: int, on_device: bool, checkpoint: Path, expected: list[list[int]]
) -> None:
    """Chains and trees, by the host and on the device; each with each in make test-all."""
    given: dict[str, Any] = {"num_steps": 3, "eagle_topk": topk, "num_draft_tokens": 4 * topk}
    llm = LLM(str(checkpoint), SpecConfig(algorithm="MTP", adaptive=False, **given), **FLAGS)
    if on_device:
        run_on_device(llm)
    assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0


def test_hybrid_model_is_refused_as_a_standalone_draft(checkpoint: Path) -> None:
    spec = SpecConfig(algorithm="STANDALONE", draft_model_path=str(checkpoint))
    with pytest.raises(ModelLoadError, match="recurrent state, which STANDALONE does not roll"):
        LLM(str(checkpoint), spec, dtype="float32", max_total_tokens=2048)
