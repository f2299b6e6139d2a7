"""Forms of a family that its small model does not show, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.models.gemma import Gemma2ForCausalLM
from specengine.target.registry import find_model_class
from tests.support.families import AS_STARTED, reference_model, save_small_model

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(40)]
ONE_BY_ONE = {"use_parallel_residual": False}

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("stablelm", {**ONE_BY_ONE, "qk_layernorm": False, "use_qkv_bias": False}),
    ("stablelm", {"num_key_value_heads": 4, "qk_layernorm": False}),
    ("gptneox", {**ONE_BY_ONE, "attention_bias": False}),
    ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
    ("arcee", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3moe", {"norm_topk_prob": False}),
    ("glm4moe", {"use_qk_norm": False, "attention_bias": False}),
    ("deepseekv3", {"norm_topk_prob": False, "rope_interleave": False}),
    ("deepseekv2", {"topk_method": "greedy"}),
    ("llama4", {"use_qk_norm": False, "attn_temperature_tuning": False}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("dots1", {"norm_topk_prob": False, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    ("hunyuandensev1", {"rope_parameters": None, "attention_bias": True}),
    ("hunyuandensev1", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
]


def load(folder: Path) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, torch.float32, torch.device("cpu"))


def assert_as_transformers(found: Tensor, folder: Path, family: str) -> None:
    with torch.no_grad():
        expected = reference_model(folder, family)(torch.tensor([PROMPT])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(("family", "fields"), FORMS)
def test_form_equals_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path, mini_runner: Any
) -> None:
    save_small_model(family, tmp_path, seed=5, **fields)
    found = mini_runner(load(tmp_path)).logits(ForwardMode.EXTEND, [PROMPT])
    assert_as_transformers(found, tmp_path, family)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in AS_STARTED),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_norms_and_biases_that_were_trained_equal_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path, mini_runner: Any
) -> None:
    """Those of these small models are ones and zeros in other tests."""

    def train(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.dim() == 1:
                tensor += torch.randn_like(tensor) * 0.2

    folder = save_small_model(family, tmp_path, seed=5, **fields)
    model = load(changed(folder, train))
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    assert_as_transformers(found, tmp_path, family)


def test_pythia_as_it_was_published(tmp_path: Path, mini_runner: Any) -> None:
    """No KV heads in config.json, rotary options under older names, tables in the weights."""
    save_small_model("gptneox", tmp_path, seed=5)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["num_key_value_heads"]
    rope = fields.pop("rope_parameters")
    fields["rotary_pct"] = rope["partial_rotary_factor"]
    fields["rotary_emb_base"] = rope["rope_theta"]
    path.write_text(json.dumps(fields))
    layer = "gpt_neox.layers.0.attention."
    tables = {
        f"{layer}bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        f"{layer}masked_bias": torch.tensor(-1e9),
        f"{layer}rotary_emb.inv_freq": torch.ones(2),
    }
    model = load(changed(tmp_path, lambda tensors: tensors.update(tables)))
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    assert_as_transformers(found, tmp_path, "gptneox")


def test_ernie_with_its_mtp_layer_loads(tmp_path: Path, mini_runner: Any) -> None:
    """Published as `mtp_block.0`, beside two norms and a projection."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.startswith("model.layers.0."):
                tensors[name.replace("layers.0", "mtp_block.0")] = tensor.clone()
        for name in ("emb_norm", "hidden_norm", "linear_proj"):
            tensors[f"model.mtp_{name}.0.weight"] = torch.ones(64)

    save_small_model("ernie4_5_moe", tmp_path, seed=5)
    found = mini_runner(load(changed(tmp_path, add))).logits(ForwardMode.EXTEND, [PROMPT])
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if ".mtp_" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(found, tmp_path, "ernie4_5_moe")


def test_heads_without_gains_are_refused(tmp_path: Path) -> None:
    save_small_model("stablelm", tmp_path, seed=5)
    name = "model.layers.1.self_attn.k_layernorm.norms.1.weight"
    changed(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(
        ModelLoadError, match=r"layers\.1\.self_attn\.k_layernorm.norms of heads \[0"
    ):
        load(tmp_path)


def test_minimax_rotates_the_part_that_published_configurations_state(
    tmp_path: Path, mini_runner: Any
) -> None:
    """`rotary_dim` alone, of which older versions of transformers make no factor."""
    folder = save_small_model("minimaxm2", tmp_path / "small", seed=5)
    found = mini_runner(load(folder)).logits(ForwardMode.EXTEND, [PROMPT])
    assert_as_transformers(found, folder, "minimaxm2")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]["partial_rotary_factor"]
    path.write_text(json.dumps(config))
    again = mini_runner(load(folder)).logits(ForwardMode.EXTEND, [PROMPT])
    assert torch.equal(again, found)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 59.8665), (torch.bfloat16, 59.75)])
def test_gemma_multiplies_embeddings_by_a_number_of_the_model_s_dtype(
    dtype: torch.dtype, factor: float
) -> None:
    """Of 9B: the root of 3584 is 59.867."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = Gemma2Config(hidden_size=3584)
        found = Gemma2ForCausalLM.multipliers(config).embedding
    finally:
        torch.set_default_dtype(before)
    assert found == pytest.approx(factor, abs=1e-3)
