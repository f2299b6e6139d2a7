"""Checkpoints of random weights have the names that this engine and transformers read."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Mxfp4Config

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import ModelConfig
from specengine.draft.mtp.checkpoint import find_layers
from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.hf_directory import read_tensor_shapes
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import reference_class, small_config
from tests.test_layering import ROOT

CPU = torch.device("cpu")
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
KEPT = ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [f"model.layers.{n}.{one}" for n in range(4) for one in KEPT],
    }
}
# By name: a family, and what its small model has otherwise.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3moe", {}),
    "deepseek_v2": ("deepseekv2", {}),
    "gpt_oss": ("gptoss", {"intermediate_size": 96}),
    "gpt_oss in mxfp4": ("gptoss", {"intermediate_size": 96}),
}


@pytest.fixture(scope="module")
def checkpoint() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks/peers")
        return importlib.import_module("checkpoint")


def fields_of(kind: str) -> dict[str, Any]:
    family, otherwise = KINDS[kind]
    fields: dict[str, Any] = small_config(family, **otherwise).to_dict()
    return fields | MXFP4 if "mxfp4" in kind else fields


def written(checkpoint: ModuleType, kind: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    fields = fields_of(kind)
    checkpoint.write_checkpoint(fields, checkpoint.published_shapes(fields), folder, CPU)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_written_names_are_those_that_both_loaders_read(
    checkpoint: ModuleType, tmp_path: Path, kind: str
) -> None:
    folder = written(checkpoint, kind, tmp_path)
    source = resolve_model(ModelConfig(model=str(folder)))
    load_model(source, find_model_class, torch.bfloat16, CPU)  # refuses missing and unexpected ones
    plain = {"quantization_config": Mxfp4Config(dequantize=True)} if "mxfp4" in kind else {}
    _, info = reference_class(KINDS[kind][0]).from_pretrained(
        folder, output_loading_info=True, **plain
    )
    assert {name: found for name, found in info.items() if found} == {}


def test_weights_are_normal_norms_one_biases_zero_and_mxfp4_codes_even(
    checkpoint: ModuleType, tmp_path: Path
) -> None:
    folder = written(checkpoint, "gpt_oss in mxfp4", tmp_path)
    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    layer = "model.layers.1."
    router = found[f"{layer}mlp.router.weight"].float()
    assert router.std().item() == pytest.approx(0.02, rel=0.15)
    assert not found[f"{layer}mlp.router.bias"].any()
    assert not found[f"{layer}mlp.experts.down_proj_bias"].any()
    assert (found[f"{layer}input_layernorm.weight"] == 1).all()
    blocks = found[f"{layer}mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (5, 192, 2, 16)
    assert blocks.float().mean().item() == pytest.approx(127.5, abs=3)
    assert found[f"{layer}mlp.experts.down_proj_scales"].unique().tolist() == [119]
    assert not torch.equal(router, found["model.layers.0.mlp.router.weight"].float())


def test_shards_are_cut_by_size_and_the_index_names_each_tensor_once(
    checkpoint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(checkpoint, "qwen3_moe", tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "SHARD", 100_000)
    cut = written(checkpoint, "qwen3_moe", tmp_path / "cut")
    files = [*cut.glob("*.safetensors")]
    assert len(files) > 3
    assert read_tensor_shapes(cut) == read_tensor_shapes(whole)
    shapes = checkpoint.published_shapes(fields_of("qwen3_moe"))
    assert checkpoint.num_bytes(shapes) == sum(
        one.nbytes for file in files for one in load_file(file).values()
    )


def test_mtp_layer_of_the_target_s_form_is_found(checkpoint: ModuleType, tmp_path: Path) -> None:
    fields = fields_of("deepseek_v2")
    shapes = checkpoint.mtp_shapes(fields, checkpoint.published_shapes(fields))
    checkpoint.write_checkpoint(fields, shapes, tmp_path, CPU)
    (layer,) = find_layers(tmp_path, fields["hidden_size"])
    assert (layer.form.name, layer.layer_id) == ("DeepSeek-V3", fields["num_hidden_layers"])
    assert not layer.has_embed_tokens


def test_mtp_layer_of_qwen3_next_is_in_the_model_s_own_folder_where_it_drafts(
    checkpoint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, folder = tmp_path / "shape.json", tmp_path / "model"
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    shape.write_text(json.dumps(small_config("qwen3next", **layers).to_dict() | FP8))
    monkeypatch.setattr(sys, "argv", ["", str(shape), str(folder), "--mtp", str(folder)])
    checkpoint.main()
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert {"mtp.fc", "mtp.layers.0.mlp.gate"} <= {*kept["modules_to_not_convert"]}
    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert found["mtp.fc.weight"].dtype == torch.bfloat16
    assert found["mtp.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    drafts = SpecConfig(algorithm="MTP", num_steps=2)  # it refuses missing and unexpected ones
    (plain,), (drafted,) = (
        LLM(str(folder), one, device="cpu", max_total_tokens=256).generate(["to be"], params)
        for one in (None, drafts)
    )
    assert drafted.token_ids == plain.token_ids


def test_a_last_layer_without_attention_is_no_mtp_layer(checkpoint: ModuleType) -> None:
    fields = checkpoint.first_layers(checkpoint.fields_of("qwen3-next-fp8-shape"), 6)
    with pytest.raises(SystemExit, match="layer 6 is none of attention"):
        checkpoint.mtp_shapes(fields, checkpoint.published_shapes(fields))


@pytest.mark.parametrize(
    ("shape", "gigabytes", "name"),
    [
        ("qwen3-30b-a3b-shape", 61.1, "model.layers.47.mlp.experts.127.down_proj.weight"),
        ("gpt-oss-20b-mxfp4-shape", 13.8, "model.layers.23.mlp.experts.down_proj_blocks"),
        ("qwen3-next-fp8-shape", 80.4, "model.layers.0.mlp.experts.5.up_proj.weight_scale_inv"),
        ("deepseek-v2-lite-shape", 31.4, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    ],
)
def test_sizes_of_the_published_models(
    checkpoint: ModuleType, shape: str, gigabytes: float, name: str
) -> None:
    shapes = checkpoint.published_shapes(BUILTIN_MODELS[shape].config)
    assert checkpoint.num_bytes(shapes) / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert name in shapes


def test_weights_of_other_quantisations_are_refused(checkpoint: ModuleType) -> None:
    with pytest.raises(SystemExit, match="quantised by compressed-tensors"):
        checkpoint.published_shapes(checkpoint.fields_of("llama-3.1-8b-w4a16-shape"))
    with pytest.raises(SystemExit, match="neither a JSON file nor one of the shapes"):
        checkpoint.fields_of("no-such-shape")


def test_first_layers_are_a_model_of_their_own(checkpoint: ModuleType) -> None:
    fields = checkpoint.fields_of("qwen3-next-fp8-shape")
    shapes = checkpoint.published_shapes(checkpoint.first_layers(fields, 4))
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    assert layers == {"0", "1", "2", "3"}
    assert "model.layers.3.self_attn.q_proj.weight" in shapes


def test_weights_in_fp8_blocks_are_read_and_have_the_deviation_of_others(
    checkpoint: ModuleType, tmp_path: Path
) -> None:
    plain = small_config("qwen3next").to_dict()
    shapes = checkpoint.published_shapes(plain | FP8)
    assert {name for name in shapes if not name.endswith("_scale_inv")} == set(
        checkpoint.published_shapes(plain)
    )
    checkpoint.write_checkpoint(plain | FP8, shapes, tmp_path, CPU)
    source = resolve_model(ModelConfig(model=str(tmp_path)))
    load_model(source, find_model_class, torch.bfloat16, CPU)  # refuses missing and unexpected ones
    found = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    assert found[name].dtype == torch.float8_e4m3fn
    weight = found[name].float() * found[f"{name}_scale_inv"].unique()
    assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
