"""Checkpoints that name, merge or order their tensors otherwise fill the same parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.kernels.attention.rope_ref import rotate
from specengine.layers.linear import MergedLinear
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.weights import floating_pairs, halved, load_weights, renamed

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


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_pairs_side_by_side_score_as_pairs_apart(rotary_dim: int) -> None:
    """Rotating neighbours and taking scores is rotating halves of reordered rows."""
    torch.manual_seed(0)
    x, q, k = torch.randn(5, 4), torch.randn(16, 4), torch.randn(8, 4)
    table = RotaryEmbedding(rotary_dim, 9, {"rope_type": "default", "rope_theta": 50.0})
    positions, angles = torch.tensor([0, 3, 8, 1, 5]), table.cos_sin_cache
    weights = dict(halved([("l.q_proj.weight", q), ("l.k_proj.weight", k)], 8, rotary_dim))

    def heads(weight: Tensor) -> Tensor:
        return (x @ weight.t()).view(5, -1, 8)

    def scores(q_heads: Tensor, k_heads: Tensor) -> Tensor:
        return torch.einsum("qhd,kgd->hgqk", q_heads, k_heads)

    def neighbours(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y[..., :rotary_dim].reshape(*y.shape[:2], -1, 2))
        half = rotary_dim // 2
        turn = torch.complex(angles[positions, :half], angles[positions, half:])[:, None]
        turned = torch.view_as_real(pairs * turn).flatten(2)
        return torch.cat((turned, y[..., rotary_dim:]), -1)

    expected = scores(neighbours(heads(q)), neighbours(heads(k)))
    turned = [
        rotate(heads(weights[f"l.{name}.weight"]), positions, angles)
        for name in ("q_proj", "k_proj")
    ]
    torch.testing.assert_close(scores(*turned), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q_proj.weight", "qkv_proj.weight", "k_proj.qweight"])
def test_quantised_rotary_pairs_are_refused(name: str) -> None:
    kind = torch.float32 if name.endswith("qweight") else torch.int8
    with pytest.raises(ModelLoadError, match=f"l.{name} is quantised, .*rotary pairs"):
        list(floating_pairs([(f"l.{name}", torch.zeros(4, 4, dtype=kind))]))
    blocks = "l.q_proj.q8_0", torch.zeros(4, 34, dtype=torch.uint8)  # a row an output
    passed = [("l.v_proj.qweight", torch.zeros(2, 2)), ("l.q_proj.bias", torch.zeros(4)), blocks]
    assert list(floating_pairs(passed)) == passed
