from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.linear import Linear, LMHead, MergedLinear
from specengine.layers.weights import load_weights, weight_places

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


class _Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = VocabEmbedding(6, 4)
        self.attn = nn.ModuleDict(
            {"qkv_proj": MergedLinear(4, [4, 2, 2], bias=True), "o_proj": Linear(4, 4)}
        )
        self.head = LMHead(4, 6)
        if tied:
            self.head.tie(self.embed.weight)


def _checkpoint() -> dict[str, Tensor]:
    return {
        "embed.weight": torch.randn(6, 4),
        "attn.q_proj.weight": torch.randn(4, 4),
        "attn.k_proj.weight": torch.randn(2, 4),
        "attn.v_proj.weight": torch.randn(2, 4),
        "attn.q_proj.bias": torch.randn(4),
        "attn.k_proj.bias": torch.randn(2),
        "attn.v_proj.bias": torch.randn(2),
        "attn.o_proj.weight": torch.randn(4, 4),
        "head.weight": torch.randn(6, 4),
    }


def test_parts_stand_in_order_in_the_merged_weight() -> None:
    model, weights = _Model(), _checkpoint()
    load_weights(model, reversed(weights.items()), PACKED)
    state = model.state_dict()
    parts = [weights[f"attn.{part}.weight"] for part in PACKED["qkv_proj"]]
    assert torch.equal(state["attn.qkv_proj.weight"], torch.cat(parts))
    biases = [weights[f"attn.{part}.bias"] for part in PACKED["qkv_proj"]]
    assert torch.equal(state["attn.qkv_proj.bias"], torch.cat(biases))
    assert torch.equal(state["head.weight"], weights["head.weight"])


def test_every_part_has_a_place() -> None:
    assert set(weight_places(_Model(), PACKED)) == set(_checkpoint())


def test_a_tied_head_shares_the_embedding_and_needs_no_tensor() -> None:
    model, weights = _Model(tied=True), _checkpoint()
    head = weights.pop("head.weight")
    load_weights(model, weights.items(), PACKED)
    assert model.head.weight is model.embed.weight
    load_weights(model, [*weights.items(), ("head.weight", head)], PACKED, ["head.weight"])
    assert torch.equal(model.embed.weight, weights["embed.weight"])


def test_computed_tables_of_old_checkpoints_are_skipped() -> None:
    table = ("attn.rotary_emb.inv_freq", torch.ones(2))
    load_weights(_Model(), [*_checkpoint().items(), table], PACKED)


def test_values_are_converted_to_the_model_type() -> None:
    model, weights = _Model().to(torch.bfloat16), _checkpoint()
    load_weights(model, weights.items(), PACKED)
    assert torch.equal(model.embed.weight, weights["embed.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("name", ["attn.k_proj.weight", "attn.v_proj.bias", "head.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    weights = _checkpoint()
    del weights[name]
    with pytest.raises(ModelLoadError, match=f"missing tensor {name}"):
        load_weights(_Model(), weights.items(), PACKED)


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(ModelLoadError, match="and 4 more"):
        load_weights(_Model(), [], PACKED)


def test_an_unexpected_tensor_is_named() -> None:
    weights = _checkpoint() | {"attn.o_proj.bias": torch.zeros(4)}
    with pytest.raises(ModelLoadError, match=r"unexpected tensor attn\.o_proj\.bias \[4\]"):
        load_weights(_Model(), weights.items(), PACKED)


def test_a_wrong_shape_is_named() -> None:
    weights = _checkpoint() | {"attn.k_proj.weight": torch.zeros(4, 2)}
    message = r"attn\.k_proj\.weight has shape \[4, 2\], the model needs \[2, 4\]"
    with pytest.raises(ModelLoadError, match=message):
        load_weights(_Model(), weights.items(), PACKED)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("width", [4, 2], ids=["whole", "packed"])
def test_quantised_weights_are_refused_by_name(dtype: torch.dtype, width: int) -> None:
    weights = _checkpoint() | {"attn.k_proj.weight": torch.zeros(2, width).to(dtype)}
    message = rf"attn\.k_proj\.weight has type {dtype}, and config.json names no quantisation"
    with pytest.raises(ModelLoadError, match=message):
        load_weights(_Model(), weights.items(), PACKED)
