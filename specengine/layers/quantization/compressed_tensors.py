"""compressed-tensors (llm-compressor): `float-quantized` (FP8) and `pack-quantized` (4 and 8 bits
of weights alone), stated in groups of layers.

`weight_packed` int32 holds codes v + 2 ** (bits - 1) of signed v, eight of 4 bits in a word, the
lowest bits first, along the inputs; `weight_zero_point` so too, along the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.kernels.linear.quantised import Fp8Weight, IntWeight
from specengine.layers.quantization.fp8 import random_fp8, read_fp8
from specengine.layers.quantization.int_codes import make_int, random_words, sort_groups
from specengine.layers.quantization.method import LayerTensors, Quantization, unpack_int32

_METHOD = "compressed-tensors"
_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


@dataclass(frozen=True)
class _Weights:
    """How the weights of one group are quantised. group_size 0: a scale a row."""

    is_float: bool
    bits: int
    group_size: int
    is_symmetric: bool
    block: tuple[int, int] | None
    has_order: bool  # weight_g_idx is there
    rounds_input: bool
    is_static: bool


class CompressedTensors(Quantization):
    def __init__(self, groups: Sequence[tuple[Sequence[str], _Weights]]) -> None:
        self.groups = groups

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CompressedTensors:
        named = fields.get("format", "pack-quantized")
        if named not in _FORMATS:
            raise _refused(f"format {named!r}", ", ".join(_FORMATS))
        sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise _refused(f"sparsity {sparsity!r}", "dense")
        if transforms := (fields.get("transform_config") or {}).get("config_groups"):
            raise _refused(f"transforms {', '.join(transforms)}", "weights that need none")
        groups = (fields.get("config_groups") or {}).values()
        if not groups:
            raise _refused("a configuration without config_groups", "such with them")
        return cls([(list(one.get("targets") or ["Linear"]), _weights(one)) for one in groups])

    def read(self, layer: LayerTensors) -> Fp8Weight | IntWeight:
        found = self._group(layer)
        if found.is_float:
            return read_fp8(layer, found.block, found.is_static, found.rounds_input)
        return _read_packed(layer, found)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = self.groups[0][1]
        if found.is_float:
            tensors = random_fp8(rows, columns, found.block, generator)
            if found.is_static:
                tensors["input_scale"] = torch.full((1,), 0.05, device=generator.device)
            return tensors
        groups = columns // (found.group_size or columns)
        scale = 0.02 / 2 ** (found.bits - 2)
        tensors = {
            "weight_packed": random_words(rows, columns * found.bits // 32, generator),
            "weight_scale": torch.full((rows, groups), scale, device=generator.device),
        }
        if not found.is_symmetric:
            packed = rows * found.bits // 32
            tensors["weight_zero_point"] = random_words(packed, groups, generator)
        if found.has_order:
            group = torch.arange(columns, device=generator.device) // (columns // groups)
            tensors["weight_g_idx"] = group
        return tensors

    def _group(self, layer: LayerTensors) -> _Weights:
        """The first whose targets name the layer: by its name, a pattern of it, or its class."""
        for targets, weights in self.groups:
            if any(_matches(target, layer.name) for target in targets):
                return weights
        raise layer.refused("is quantised, and no group of config_groups names it")


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == "Linear" or name == target or name.endswith(f".{target}")


def _weights(group: Mapping[str, Any]) -> _Weights:
    weights, given = group.get("weights") or {}, group.get("input_activations")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    known = {"float": ("tensor", "channel", "block"), "int": ("channel", "group")}
    if strategy not in known.get(kind, ()) or (kind, bits) not in (
        ("float", 8),
        ("int", 4),
        ("int", 8),
    ):
        raise _refused(
            f"weights of {bits} bits, type {kind!r}, strategy {strategy!r}",
            "float of 8 bits by tensor, channel or block; int of 4 or 8 bits by channel or group",
        )
    if kind == "int" and given:
        raise _refused("int weights with quantised activations", "activations as they are")
    given = given or {}
    if kind == "float" and given and (given.get("type"), given.get("num_bits")) != ("float", 8):
        raise _refused(f"activations of type {given.get('type')!r}", "float of 8 bits")
    block = weights.get("block_structure")
    return _Weights(
        is_float=kind == "float",
        bits=bits,
        group_size=(weights.get("group_size") or 0) if strategy == "group" else 0,
        is_symmetric=weights.get("symmetric", True),
        block=(int(block[0]), int(block[1])) if strategy == "block" and block else None,
        has_order=weights.get("actorder") in ("group", True),
        rounds_input=bool(given),
        is_static=bool(given) and not given.get("dynamic", False),
    )


def _read_packed(layer: LayerTensors, form: _Weights) -> IntWeight:
    rows, columns = layer.rows, layer.columns
    words = 32 // form.bits
    group = form.group_size or columns
    codes = unpack_int32(layer.shaped("weight_packed", rows, -(-columns // words)), form.bits)
    scale = layer.shaped("weight_scale", rows, -(-columns // group))
    zero = None
    if not form.is_symmetric:
        packed = layer.shaped("weight_zero_point", -(-rows // words), scale.shape[1])
        zero = unpack_int32(packed.T.contiguous(), form.bits)[:, :rows].T.contiguous()
    layer.drop("weight_shape")
    groups = layer.shaped("weight_g_idx", columns) if form.has_order else None
    order = None if groups is None else sort_groups(layer, groups, group)
    return make_int(layer, codes[:, :columns], scale, zero, form.bits, order)


def _refused(found: str, known: str) -> ModelLoadError:
    return ModelLoadError(f"quantisation {_METHOD}: {found} is not supported; known: {known}")
