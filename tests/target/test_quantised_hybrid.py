"""Qwen3-Next in FP8 with a scale a block: scales of projections that stand together by key head
come apart as their weights do. Experts and in_proj_ba stay as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.quantised import Format, Pair, edit_config, fp8

TOKENS = [[5, 9, 301, 17, 4], [7]]
BLOCKS = Format(
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
    lambda weight: fp8(weight, (16, 16), "weight_scale_inv", None),
)


def _quantised(source: Path, folder: Path) -> Pair:
    pair = Pair(folder / "quantised", folder / "dense")
    for one in (pair.quantised, pair.dense):
        shutil.copytree(source, one)
    tensors, dense = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("attn.in_proj_qkvz.weight", "out_proj.weight", "o_proj.weight")):
            tensors[name] = dense[name] = tensor
            continue
        made, stem = BLOCKS.pack(tensor), name.removesuffix("weight")
        tensors |= {f"{stem}{leaf}": one for leaf, one in made.tensors.items()}
        dense[name] = made.dense
    for place, held in ((pair.quantised, tensors), (pair.dense, dense)):
        save_file(held, place / "model.safetensors", metadata={"format": "pt"})
    edit_config(pair.quantised, quantization_config=BLOCKS.config)
    return pair


def _logits(folder: Path, mini_runner: Any) -> Tensor:
    source = resolve_model(ModelConfig(model=str(folder)))
    model = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    found: Tensor = mini_runner(model).logits(ForwardMode.EXTEND, TOKENS)
    return found


def test_fp8_blocks_of_projections_by_head_come_apart(
    small_models: dict[str, Path], tmp_path: Path, mini_runner: Any
) -> None:
    pair = _quantised(small_models["qwen3next"], tmp_path)
    found, expected = (_logits(one, mini_runner) for one in (pair.quantised, pair.dense))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
