"""Packs weights as checkpoints hold them, written from the formats' definitions with loops and
numpy, and not with what reads them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Packed:
    """tensors: by leaf. dense: float32 [N, K], what they stand for."""

    tensors: Tensors
    dense: Tensor


@dataclass(frozen=True)
class Format:
    """config: `quantization_config`. pack: weight [N, K] -> Packed. file: where config stands."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    file: str = "config.json"


def fp8(weight: Tensor, block: tuple[int, int], name: str, static: str | None) -> Packed:
    """block: rows and columns of a scale; 0 is all of them. static: name of the input's scale."""
    rows, columns = block[0] or len(weight), block[1] or weight.shape[1]
    shape = -(-len(weight) // rows), -(-weight.shape[1] // columns)
    scale, codes = torch.empty(shape), torch.empty(weight.shape, dtype=FP8)
    dense = torch.empty_like(weight)
    for r in range(shape[0]):
        for c in range(shape[1]):
            part = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scale[r, c] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[r, c]).to(FP8)
            dense[part] = codes[part].float() * scale[r, c]
    tensors = {"weight": codes, name: scale[0, 0] if block == (0, 0) else scale}
    return Packed(tensors | ({} if static is None else {static: torch.tensor(0.7)}), dense)


def fp8_rows_of_modelopt(weight: Tensor) -> Packed:
    """FP8_PER_CHANNEL_PER_TOKEN: a scale a row, [N]."""
    made = fp8(weight, (1, 0), "weight_scale", None)
    return Packed(made.tensors | {"weight_scale": made.tensors["weight_scale"][:, 0]}, made.dense)


def fp8_blocks_of_modelopt(weight: Tensor) -> Packed:
    """FP8_PB_WO: a scale a block of 128 x 128, [N / 128, 1, K / 128, 1]."""
    made = fp8(weight, (128, 128), "weight_scale", None)
    scale = made.tensors["weight_scale"][:, None, :, None]
    return Packed(made.tensors | {"weight_scale": scale}, made.dense)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m * bits / 32]: order[i] is the column of a word that lies at i."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = np.zeros((codes.shape[0], codes.shape[1] // count), dtype=np.uint32)
    for place, column in enumerate(order):
        out |= codes[:, column::count].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


@dataclass(frozen=True)
class Grid:
    """codes: [N, K]; zero, scale: [N, groups]; dense: [N, K]; group: of each column."""

    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    group: np.ndarray
    dense: Tensor


def grid(weight: Tensor, bits: int, size: int, symmetric: bool, group: np.ndarray | None) -> Grid:
    """Rounded to whole numbers by groups of columns; scales are float16."""
    wide = weight.numpy().astype(np.float64)
    group = np.arange(wide.shape[1]) // size if group is None else group
    count = int(group.max()) + 1
    codes = np.zeros(wide.shape, dtype=np.int64)
    zero, scale = np.zeros((2, len(wide), count))
    most = 2**bits - 1
    for one in range(count):
        part = wide[:, group == one]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high, low = np.abs(part).max(1), -np.abs(part).max(1)
        step = ((high - low) / most).astype(np.float16).astype(np.float64)
        start = np.full(len(wide), 2.0 ** (bits - 1)) if symmetric else np.round(-low / step)
        start = start if symmetric else np.clip(start, 1, most)
        codes[:, group == one] = np.clip(np.round(part / step[:, None]) + start[:, None], 0, most)
        zero[:, one], scale[:, one] = start, step
    dense = (codes - zero[:, group]) * scale[:, group]
    return Grid(codes, zero.astype(np.int64), scale, group, torch.from_numpy(dense).float())


def half(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.float16)


def awq(weight: Tensor, size: int) -> Packed:
    made, order = grid(weight, 4, size, False, None), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(made.codes.T, 4, order),
        "qzeros": words(made.zero.T, 4, order),
        "scales": half(made.scale.T),
    }
    return Packed(tensors, made.dense)


def gptq(
    weight: Tensor, bits: int, size: int, symmetric: bool, act_order: bool, offset: int
) -> Packed:
    columns = weight.shape[1]
    group = np.arange(columns) // size
    if act_order:  # by the input, so that layers of one input have the same
        group = group[np.random.default_rng(columns).permutation(columns)]
    made = grid(weight, bits, size, symmetric, group)
    tensors = {
        "qweight": words(made.codes, bits).T.contiguous(),
        "qzeros": words(made.zero.T - offset, bits),
        "scales": half(made.scale.T),
        "g_idx": torch.from_numpy(group).to(torch.int32),
    }
    return Packed(tensors, made.dense)


def packed(weight: Tensor, bits: int, size: int, symmetric: bool, act_order: bool) -> Packed:
    """compressed-tensors' `pack-quantized`."""
    columns = weight.shape[1]
    group = np.arange(columns) // size
    if act_order:
        group = group[np.random.default_rng(columns).permutation(columns)]
    made = grid(weight, bits, size, symmetric, group)
    tensors = {
        "weight_packed": words(made.codes, bits),
        "weight_scale": half(made.scale),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(made.zero.T, bits).T.contiguous()
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(group).to(torch.int32)
    return Packed(tensors, made.dense)


def _compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, form: str
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def _modelopt(algorithm: str) -> dict[str, Any]:
    """hf_quant_config.json."""
    stated = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt"}, "quantization": stated}


def _int(bits: int, size: int | None, **more: Any) -> dict[str, Any]:
    kind = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": True, **kind, **more}


_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_ROWS, _ALL = (1, 0), (0, 0)

FORMATS: dict[str, Format] = {
    "fp8 tensor": Format(_FP8, lambda w: fp8(w, _ALL, "weight_scale", None)),
    "fp8 static": Format(
        _FP8 | {"activation_scheme": "static"},
        lambda w: fp8(w, _ALL, "weight_scale", "input_scale"),
    ),
    "fp8 blocks": Format(
        _FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
        lambda w: fp8(w, (32, 32), "weight_scale_inv", None),
    ),
    "fp8 blocks of 128": Format(
        _FP8 | {"weight_block_size": [128, 128]},
        lambda w: fp8(w, (128, 128), "weight_scale_inv", None),
    ),
    "compressed fp8 static": Format(
        _compressed(_float("tensor"), _STATIC, "float-quantized"),
        lambda w: fp8(w, _ALL, "weight_scale", "input_scale"),
    ),
    "compressed fp8 rows": Format(
        _compressed(_float("channel"), _TOKEN, "float-quantized"),
        lambda w: fp8(w, _ROWS, "weight_scale", None),
    ),
    "compressed fp8 blocks": Format(
        _compressed(_float("block", block_structure=[32, 32]), _TOKEN, "float-quantized"),
        lambda w: fp8(w, (32, 32), "weight_scale", None),
    ),
    "modelopt": Format(
        _MODELOPT | {"quant_algo": "FP8"},
        lambda w: fp8(w, _ALL, "weight_scale", "input_scale"),
    ),
    "modelopt in its own file": Format(
        _modelopt("FP8"),
        lambda w: fp8(w, _ALL, "weight_scale", "input_scale"),
        "hf_quant_config.json",
    ),
    "modelopt rows": Format(
        _MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8_rows_of_modelopt,
    ),
    "modelopt rows in its own file": Format(
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        fp8_rows_of_modelopt,
        "hf_quant_config.json",
    ),
    "modelopt blocks": Format(_MODELOPT | {"quant_algo": "FP8_PB_WO"}, fp8_blocks_of_modelopt),
    "modelopt blocks in its own file": Format(
        _modelopt("FP8_PB_WO"), fp8_blocks_of_modelopt, "hf_quant_config.json"
    ),
    "awq": Format(_AWQ, lambda w: awq(w, 32)),
    "gptq": Format(_GPTQ, lambda w: gptq(w, 4, 32, True, False, 1)),
    "gptq asymmetric": Format(
        _GPTQ | {"sym": False}, lambda w: gptq(w, 4, 32, False, False, 1)
    ),
    "gptq act-order": Format(
        _GPTQ | {"desc_act": True, "sym": False}, lambda w: gptq(w, 4, 32, False, True, 1)
    ),
    "gptq v2": Format(
        _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        lambda w: gptq(w, 4, 32, False, False, 0),
    ),
    "gptq of 8 bits": Format(_GPTQ | {"bits": 8}, lambda w: gptq(w, 8, 32, True, False, 1)),
    "compressed w4a16": Format(
        _compressed(_int(4, 32), None, "pack-quantized"), lambda w: packed(w, 4, 32, True, False)
    ),
    "compressed w4a16 rows": Format(
        _compressed(_int(4, None), None, "pack-quantized"),
        lambda w: packed(w, 4, w.shape[1], True, False),
    ),
    "compressed w4a16 asymmetric": Format(
        _compressed(_int(4, 32, symmetric=False), None, "pack-quantized"),
        lambda w: packed(w, 4, 32, False, False),
    ),
    "compressed w4a16 act-order": Format(
        _compressed(_int(4, 32, actorder="group"), None, "pack-quantized"),
        lambda w: packed(w, 4, 32, True, True),
    ),
    "compressed w8a16": Format(
        _compressed(_int(8, 32), None, "pack-quantized"), lambda w: packed(w, 8, 32, True, False)
    ),
}  # fmt: skip


# What has two dimensions and is no product of a layer that published checkpoints quantise.
_OTHERS = re.compile(
    r"embed|lm_head|norm|bias|correction|\.(gate|router|shared_expert_gate|in_proj_[ab])\."
)


@dataclass(frozen=True)
class Pair:
    """Folders of one model: its checkpoint in a format, and the dense one that it stands for."""

    quantised: Path
    dense: Path


def quantise_model(source: Path, folder: Path, form: Format) -> Pair:
    """Every product of the layers but for what checkpoints leave in floating point (routers, few
    rows), the first layer's down_proj, and experts that stand in one tensor."""
    pair = Pair(folder / "quantised", folder / "dense")
    for one in (pair.quantised, pair.dense):
        shutil.copytree(source, one)
    tensors: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_product = tensor.dim() == 2 and _OTHERS.search(name) is None
        if not is_product or name.endswith("layers.0.mlp.down_proj.weight"):
            tensors[name] = dense[name] = tensor
            continue
        made = form.pack(tensor)
        tensors |= {f"{name.removesuffix('weight')}{leaf}": t for leaf, t in made.tensors.items()}
        dense[name] = made.dense
    for place, held in ((pair.quantised, tensors), (pair.dense, dense)):
        whole = {name: tensor.contiguous() for name, tensor in held.items()}
        save_file(whole, place / "model.safetensors", metadata={"format": "pt"})
    if form.file == "config.json":
        edit_config(pair.quantised, quantization_config=form.config)
    else:
        (pair.quantised / form.file).write_text(json.dumps(form.config))
    return pair


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
