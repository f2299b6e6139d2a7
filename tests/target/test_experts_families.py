"""Families with mixtures of experts whose biases, corrections and gains are not what transformers
starts them with: zeros and ones hide what is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.kernels.linear import mxfp4
from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.experts import Experts
from specengine.layers.layer_spec import ExpertsSpec
from specengine.layers.quantization import linears
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES, has_experts, reference_model, save_small_model
from tests.support.quantised import Pair, edit_config

WITH_EXPERTS = [family for family in FAMILIES if has_experts(family)]
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]


def changed(folder: Path, source: Path) -> Path:
    """Its vectors drawn anew."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or "correction" in name or name.endswith("_bias"):
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor + 0.3 * noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_logits_equal_transformers(
    family: str, small_models: dict[str, Path], tmp_path: Path, mini_runner: Any
) -> None:
    folder = changed(tmp_path / "changed", small_models[family])
    found = mini_runner(load(folder)).logits(ForwardMode.EXTEND, [PROMPT])
    with torch.no_grad():
        expected = reference_model(folder, family)(torch.tensor([PROMPT])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_missing_expert_is_named(small_models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(small_models["qwen3moe"], tmp_path / "torn")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing tensor .*experts\.3\.up_proj\.weight"):
        load(folder)


def test_config_that_nothing_computes_is_refused(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(small_models["ernie4_5_moe"], tmp_path / "biased")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bias": True}))
    with pytest.raises(ModelLoadError, match="use_bias"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scores": "tanh"}, "scores 'tanh'"),
        ({"activation": "relu"}, "activation 'relu'"),
        ({"num_chosen": 9}, "9 of 8 experts"),
        ({"num_groups": 3}, "1 of 3 groups"),
        ({"num_groups": 4, "num_chosen": 3}, "1 of 4 groups"),
    ],
)
def test_experts_that_nothing_computes_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        ExpertsSpec(**{"num_experts": 8, "num_chosen": 2, "intermediate_size": 4, **fields})


def in_mxfp4(folder: Path) -> Pair:
    """A GPT-OSS, as published."""
    pair = Pair(folder / "packed", folder / "whole")
    save_small_model("gptoss", pair.dense, 3, intermediate_size=96)
    shutil.copytree(pair.dense, pair.quantised)
    tensors, halves = load_file(pair.dense / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4.quantise(tensors[name].transpose(1, 2).contiguous())
        halves |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = mxfp4.dequantise(blocks, scales).transpose(1, 2).contiguous()
    assert len(halves) == 2 * 2 * 3
    save_file(tensors, pair.dense / "model.safetensors", metadata={"format": "pt"})
    rest = {name: one for name, one in tensors.items() if f"{name}_blocks" not in halves}
    save_file(rest | halves, pair.quantised / "model.safetensors", metadata={"format": "pt"})
    edit_config(pair.quantised, quantization_config={"quant_method": "mxfp4"})
    return pair


@pytest.mark.parametrize("stays_packed", [False, True], ids=["dense", "packed"])
def test_mxfp4_checkpoint_has_the_logits_of_its_dequantised_experts(
    stays_packed: bool, tmp_path: Path, mini_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = in_mxfp4(tmp_path)
    expected = mini_runner(load(pair.dense)).logits(ForwardMode.EXTEND, [PROMPT])
    monkeypatch.setattr(linears, "wants_dense", lambda device: not stays_packed)
    model = load(pair.quantised)
    kept = [one.packed is not None for one in model.modules() if isinstance(one, Experts)]
    assert kept == [stays_packed] * 3
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if stays_packed else 0)


def test_mxfp4_half_without_the_other_is_named(tmp_path: Path) -> None:
    folder = save_small_model("gptoss", tmp_path / "half", 3, intermediate_size=96)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    blocks, _ = mxfp4.quantise(tensors.pop(name).transpose(1, 2).contiguous())
    tensors[f"{name}_blocks"] = blocks
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelLoadError, match=r"missing tensor .*experts\.0\.down_proj\.scales"):
        load(folder)


def rows(*size: int) -> Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)


def test_packed_experts_come_apart() -> None:
    """Two experts, two inputs, three inner features: gate and up take turns, matrices lie down."""
    packed = ExpertTensors("e.gate_up", "e.down", swapped=True, interleaved=True)
    gate_up, down, other = rows(2, 2, 6), rows(2, 3, 2), rows(4)
    found = dict(packed.split([("l.e.gate_up", gate_up), ("l.e.down", down), ("l.x", other)]))
    assert found["l.x"] is other
    assert found["l.mlp.experts.1.gate_proj.weight"].tolist() == [[12, 18], [14, 20], [16, 22]]
    assert found["l.mlp.experts.1.up_proj.weight"].tolist() == [[13, 19], [15, 21], [17, 23]]
    assert found["l.mlp.experts.0.down_proj.weight"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert len(found) == 7
