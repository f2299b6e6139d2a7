"""Checkpoints that name, merge or order their tensors otherwise fill the same parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.linear import MergedLinear
from specengine.layers.norm import RMSNorm
from specengine.layers.weights import load_weights, renamed

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = MergedLinear(4, [6, 2, 2], bias=True)
        self.norm = RMSNorm(4, 1e-5, offset=1.0)


def filled(*weights: tuple[str, Tensor]) -> nn.Module:
    model = nn.ModuleDict({"layer": Layer()})
    with torch.no_grad():
        load_weights(model, weights, PACKED)
    return model


NORM = ("layer.norm.weight", torch.tensor([0.5, -1.0, 0.0, 2.0]))


def test_merged_and_parted_tensors_fill_the_same() -> None:
    weight, bias = torch.randn(10, 4), torch.randn(10)
    merged = filled(("layer.qkv_proj.weight", weight), ("layer.qkv_proj.bias", bias), NORM)
    parts = [
        (f"layer.{name}.{kind}", part)
        for kind, whole in (("weight", weight), ("bias", bias))
        for name, part in zip(PACKED["qkv_proj"], torch.split(whole, [6, 2, 2]), strict=True)
    ]
    apart = filled(*parts, NORM).state_dict()
    assert apart.keys() == merged.state_dict().keys()
    for name, found in merged.state_dict().items():
        assert torch.equal(found, apart[name])
    assert torch.equal(apart["layer.qkv_proj.weight"], weight)


def test_merged_tensor_of_another_height_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"layer.qkv_proj.weight has shape \[9, 4\].* 10 rows"):
        filled(("layer.qkv_proj.weight", torch.zeros(9, 4)))


def test_offset_is_added_to_gains_in_float32() -> None:
    weight, bias = torch.randn(10, 4), torch.randn(10)
    model = filled(("layer.qkv_proj.weight", weight), ("layer.qkv_proj.bias", bias), NORM)
    assert model.state_dict()["layer.norm.weight"].tolist() == [1.5, 0.0, 1.0, 3.0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert RMSNorm(4, 1e-5, offset=1.0).weight.dtype == torch.float32
        assert RMSNorm(4, 1e-5).weight.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


def test_names_are_exchanged_part_by_part() -> None:
    names = {"after": "before", "before": "middle"}
    given = [("a.after.weight", torch.zeros(1)), ("a.before.weight", torch.zeros(1))]
    assert [name for name, _ in renamed(given, names)] == ["a.before.weight", "a.middle.weight"]
