"""FP8 (e4m3) as transformers, vLLM, DeepSeek and Qwen write it: `quant_method` "fp8".

`weight` has one scale (`weight_scale`), one a row, or one a block (`weight_scale_inv`, 128 x 128),
which its codes are multiplied by, whatever the name says. `input_scale`, or `activation_scale`, is
there where `activation_scheme` is "static". Also made of a checkpoint in floating point while it
is loaded (--quantization fp8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.layers.quantization.method import LayerTensors, Quantization, require

_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(Quantization):
    def __init__(self, block: tuple[int, int] | None = None, is_static: bool = False) -> None:
        self.block = block
        self.is_static = is_static

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Fp8:
        schemes = ("dynamic", "static")
        require(fields, "fp8", activation_scheme=schemes, fmt=("e4m3", "float8_e4m3fn"))
        size = fields.get("weight_block_size")
        is_static = fields.get("activation_scheme") == "static"
        return cls((int(size[0]), int(size[1])) if size else None, is_static)

    def read(self, layer: LayerTensors) -> Fp8Weight:
        return read_fp8(layer, self.block, self.is_static)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        tensors = random_fp8(rows, columns, self.block, generator)
        if self.is_static:
            tensors["input_scale"] = torch.full((), 0.05, device=generator.device)
        return tensors


class Fp8WhileLoading(Fp8):
    """Layers in floating point become FP8: a scale a row, inputs by their own."""

    def encode(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight.of(weight)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        scale = torch.full((rows, 1), 0.02 / 32, device=generator.device)
        return random_fp8(rows, columns, None, generator) | {"weight_scale": scale}


def read_fp8(
    layer: LayerTensors,
    block: tuple[int, int] | None,
    is_static: bool,
    rounds_input: bool = True,
) -> Fp8Weight:
    """block: rows and columns of a scale, where there are several a row. rounds_input: whether
    activations are rounded to FP8 too. Raises ModelLoadError."""
    if layer.has("weight") and layer.tensors["weight"].dtype != FP8:
        found = layer.tensors["weight"].dtype
        raise layer.refused(f"has type {found}; of FP8 only float8_e4m3fn is read")
    codes = layer.shaped("weight", layer.rows, layer.columns).contiguous()
    rows, columns = _scale_places(layer, block)
    scale = layer.need(*_SCALES).float()
    scale = scale.reshape(-(-layer.rows // rows), -(-layer.columns // columns)).contiguous()
    given: Fp8Input | None = None
    if is_static:
        published = layer.need("input_scale", "activation_scale").float().flatten().amax()
        given = Fp8Input(published.view(1))
    elif rounds_input:
        given = Fp8Input(group=columns if columns < layer.columns else None)
    layer.drop("input_scale", "activation_scale")
    return Fp8Weight(codes, scale, rows, columns, given if rounds_input else None)


def _scale_places(layer: LayerTensors, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of the weight that share a scale, by the number of scales."""
    found = next((layer.tensors[leaf] for leaf in _SCALES if layer.has(leaf)), None)
    rows, columns = layer.rows, layer.columns
    if found is None:
        raise layer.refused(
            f"is FP8, and its scale is missing: tensor {layer.name}.{_SCALES[1]} or {_SCALES[0]}"
        )
    if block is not None and columns % block[1] and columns > block[1]:
        raise layer.refused(f"has {columns} inputs, no multiple of its blocks of {block[1]}")
    blocks = None if block is None else -(-rows // block[0]) * -(-columns // block[1])
    if block is not None and found.numel() == blocks:
        return block
    if found.numel() == 1:
        return rows, columns
    if found.numel() == rows:
        return 1, columns
    raise layer.refused(
        f"is [{rows}, {columns}] and has scales {list(found.shape)}; one is expected, one a row"
        + ("" if block is None else f", or {blocks} for blocks of {list(block)}")
    )


def random_fp8(
    rows: int, columns: int, block: tuple[int, int] | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """`weight` and its scales: one a block, or one in all."""
    device = generator.device
    weight = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
    shape = (1, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    # Codes of a deviation of 32 leave room for 14 deviations below 448.
    scale = torch.full(shape, 0.02 / 32, device=device)
    return {"weight": (weight * 32).to(FP8), "weight_scale": scale}
