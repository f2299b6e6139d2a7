"""Rows that stand in another order in a checkpoint, of floating point and of each quantisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import even_cut
from specengine.kernels.attention.rope_ref import rotate
from specengine.kernels.linear.quantised import Fp8Weight
from specengine.layers.linear import Linear, MergedLinear, deferred_weights
from specengine.layers.quantization.linears import close_linears, make_quantization, open_linears
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.row_order import halves_of_pairs, parts_of_heads, reordered
from specengine.layers.weights import load_weights
from tests.support.pretended_ranks import on_threads
from tests.support.quantised import FORMATS, Format

NAMES = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_pairs_side_by_side_score_as_pairs_apart(rotary_dim: int) -> None:
    """Rotating neighbours and taking scores is rotating halves of reordered rows."""
    torch.manual_seed(0)
    x, q, k = torch.randn(5, 4), torch.randn(16, 4), torch.randn(8, 4)
    table = RotaryEmbedding(rotary_dim, 9, {"rope_type": "default", "rope_theta": 50.0})
    positions, angles = torch.tensor([0, 3, 8, 1, 5]), table.cos_sin_cache
    orders = {
        name: halves_of_pairs(heads, 8, rotary_dim)
        for name, heads in (("q_proj", 2), ("k_proj", 1))
    }
    weights = dict(reordered([("l.q_proj.weight", q), ("l.k_proj.weight", k)], orders))

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


def test_rows_by_head_come_apart() -> None:
    """Two heads, of parts of 1 and 2 rows."""
    assert parts_of_heads(2, [1, 2]).tolist() == [0, 3, 1, 2, 4, 5]


def test_rows_of_a_tensor_with_a_row_an_output_are_moved() -> None:
    order = torch.tensor([2, 0, 1])
    blocks = torch.arange(3, dtype=torch.uint8)[:, None].expand(3, 34)
    given = [
        ("q.bias", torch.arange(3.0)),
        ("q.q8_0", blocks),
        ("q.column_order", torch.arange(32)),
        ("k.bias", torch.ones(9)),
    ]
    found = dict(reordered([(f"l.{name}", one) for name, one in given], {"q": order}))
    assert found["l.q.bias"].tolist() == [2, 0, 1]
    assert found["l.q.q8_0"][:, 0].tolist() == [2, 0, 1]
    assert found["l.q.column_order"] is given[2][1]
    assert found["l.k.bias"] is given[3][1]
    assert len(found) == 4


def test_order_goes_beside_a_packed_layer_once() -> None:
    order, codes = torch.tensor([2, 0, 1]), torch.zeros(3, 4).to(torch.float8_e4m3fn)
    given = [
        ("l.q.weight", codes),
        ("l.q.weight_scale", torch.ones(1)),
        ("m.q.qweight", torch.ones(2)),
    ]
    found = list(reordered(given, {"q": order}))
    assert [name for name, _ in found] == [
        "l.q.weight", "l.q.row_order", "l.q.weight_scale", "m.q.qweight", "m.q.row_order"
    ]  # fmt: skip
    assert all(dict(found)[name] is one for name, one in given)
    assert dict(found)["m.q.row_order"] is order


def test_tensor_of_other_rows_than_the_order_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"l\.q\.weight has shape \[4, 2\].* 3 rows"):
        list(reordered([("l.q.weight", torch.ones(4, 2))], {"q": torch.tensor([2, 0, 1])}))


@pytest.fixture(params=list(FORMATS))
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def shuffled(rows: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))


class _Model(nn.Module):
    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        parts = [even_cut(rows, "outputs") for rows in (128, 64, 64)] if ranks > 1 else None
        sizes = [part.size for part in parts] if parts else [128, 64, 64]
        with deferred_weights():
            layers: dict[str, Linear] = {"qkv_proj": MergedLinear(64, sizes, parts=parts)}
            if parts is None:
                layers["o_proj"] = Linear(64, 96)
            self.attn = nn.ModuleDict(layers)
        open_linears(self)


def loaded(form: Format, given: list[tuple[str, Tensor]], ranks: int = 1) -> nn.ModuleDict:
    model = _Model(ranks)
    load_weights(model, given, NAMES)
    fields = {"quant_method": "modelopt"} | form.config
    close_linears(model, make_quantization(fields), torch.float32)
    return model.attn


def packed(form: Format, **rows: int) -> tuple[list[tuple[str, Tensor]], dict[str, Tensor]]:
    """Tensors of layers of 64 inputs, and what they stand for."""
    tensors, dense = [], {}
    for name, count in rows.items():
        weight = torch.randn(count, 64, generator=torch.Generator().manual_seed(count))
        made = form.pack(weight)
        tensors += [(f"attn.{name}.{leaf}", tensor) for leaf, tensor in made.tensors.items()]
        dense[name] = made.dense
    return tensors, dense


def test_each_format_s_rows_are_taken_in_their_order(form: Format) -> None:
    """Apart, and without its neighbours being touched."""
    tensors, dense = packed(form, q_proj=128, k_proj=64, v_proj=64, o_proj=96)
    orders = {name: shuffled(len(dense[name])) for name in ("q_proj", "k_proj", "o_proj")}
    found = loaded(form, list(reordered(tensors, orders)))
    q, k, o = (dense[name][order] for name, order in orders.items())
    expected = torch.cat([q, k, dense["v_proj"]])
    torch.testing.assert_close(found["qkv_proj"].plain, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found["o_proj"].plain, o, rtol=1e-6, atol=1e-7)


def test_each_format_s_merged_rows_are_taken_in_their_order(form: Format) -> None:
    tensors, dense = packed(form, qkv_proj=256, o_proj=96)
    order = parts_of_heads(4, [32, 16, 16])
    found = loaded(form, list(reordered(tensors, {"qkv_proj": order})))["qkv_proj"].plain
    torch.testing.assert_close(found, dense["qkv_proj"][order], rtol=1e-6, atol=1e-7)


def test_ranks_have_parts_of_reordered_rows(form: Format) -> None:
    tensors, dense = packed(form, qkv_proj=256)
    order = parts_of_heads(4, [32, 16, 16])
    given = list(reordered(tensors, {"qkv_proj": order}))
    found = on_threads(2, lambda: loaded(form, given, ranks=2)["qkv_proj"].plain.detach())
    halves = zip(*(one.split([64, 32, 32]) for one in found), strict=True)
    whole = torch.cat([torch.cat(parts) for parts in halves])
    torch.testing.assert_close(whole, dense["qkv_proj"][order], rtol=1e-6, atol=1e-7)


def blocks_of(rows: int, block: int) -> Fp8Weight:
    codes = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    scale = torch.rand(-(-rows // block), 2) + 0.5
    return Fp8Weight(codes.to(torch.float8_e4m3fn), scale, block, 32)


@pytest.mark.parametrize(
    ("rows", "block", "order", "keeps"),
    [
        (256, 64, halves_of_pairs(4, 64, 64), True),  # within blocks
        (256, 128, halves_of_pairs(4, 64, 32), True),
        (384, 128, parts_of_heads(1, [128] * 3), True),
        (384, 64, parts_of_heads(2, [64] * 3), True),  # blocks change places
        (200, 64, halves_of_pairs(1, 200, 8), True),  # the last block is cut short
        (96, 64, halves_of_pairs(2, 48, 48), False),  # a head of two blocks
        (192, 64, parts_of_heads(2, [32] * 3), False),
        (200, 64, torch.arange(200).flip(0), False),
    ],
)
def test_blocks_of_fp8_keep_their_scale_where_rows_stay_together(
    rows: int, block: int, order: Tensor, keeps: bool
) -> None:
    weight = blocks_of(rows, block)
    found = weight.take_rows(order)
    assert torch.equal(found.dequantised(), weight.dequantised()[order])
    assert found.rows == (block if keeps else 1)
    assert found.scale.numel() == (weight.scale.numel() if keeps else 2 * rows)


def test_layer_left_in_floating_point_has_its_rows_moved_beside_quantised_ones() -> None:
    tensors, dense = packed(FORMATS["awq"], q_proj=128, k_proj=64, o_proj=96)
    plain, order = torch.randn(64, 64), shuffled(64)
    given = [*tensors, ("attn.v_proj.weight", plain)]
    found = loaded(FORMATS["awq"], list(reordered(given, {"v_proj": order})))["qkv_proj"].plain
    expected = torch.cat([dense["q_proj"], dense["k_proj"], plain[order]])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_scale_beside_a_layer_in_floating_point_is_refused() -> None:
    tensors, _ = packed(FORMATS["awq"], q_proj=128, k_proj=64, o_proj=96)
    given = [*tensors, ("attn.v_proj.weight", torch.ones(64, 64))]
    given += [("attn.v_proj.weight_scale", torch.ones(1))]
    with pytest.raises(ModelLoadError, match=r"unexpected tensor attn\.v_proj\.weight_scale"):
        loaded(FORMATS["awq"], list(reordered(given, {"v_proj": shuffled(64)})))
