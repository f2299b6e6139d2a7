"""Experts in 8 and 4 bits: Triton against a float32 reference of dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.experts import experts_triton, packed_triton, widened_triton
from specengine.kernels.experts.experts import experts, room_for_parts
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import Tile, Tiles
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights
from specengine.kernels.linear import fp8_linear_ref, mxfp4
from specengine.kernels.linear.quantised import FP8, FP8_MAX, Fp8Input, Fp8Weight, IntWeight
from specengine.kernels.linear.rounded import put_beside
from tests.halves import each_value
from tests.kernels import offline_triton
from tests.kernels.test_experts import choose, summed

HIDDEN, INNER = 96, 64  # three blocks of 32 columns, and two


@pytest.fixture(autouse=True)
def _interpreter_rounds_inputs_in_pytorch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter rounds 7.9 to 4 in FP8: it drops the carry into the exponent."""
    if device.type == "cpu":
        monkeypatch.setattr(packed_triton, "quantise_rows", fp8_linear_ref.quantise_rows)
        monkeypatch.setattr(packed_triton, "ROUNDS_INSIDE", False)


def fp8(rows: int, columns: int, form: Fp8Input | None) -> Callable[[Tensor], Fp8Weight]:
    """rows, columns: that share a scale; 0 is all."""

    def of(weight: Tensor) -> Fp8Weight:
        tall, wide = rows or len(weight), columns or weight.shape[1]
        scale = torch.empty(-(-len(weight) // tall), -(-weight.shape[1] // wide))
        for r in range(scale.shape[0]):
            for c in range(scale.shape[1]):
                part = weight[r * tall : (r + 1) * tall, c * wide : (c + 1) * wide]
                scale[r, c] = part.abs().max() / FP8_MAX
        made = Fp8Weight(torch.zeros(weight.shape).to(FP8), scale, tall, wide, form)
        step = replace(made, codes=torch.ones(weight.shape).to(FP8)).dequantised()
        return replace(made, codes=(weight / step).clamp(-FP8_MAX, FP8_MAX).to(FP8))

    return of


def whole_numbers(bits: int, group: int, has_zero: bool, order: bool) -> Any:
    def of(weight: Tensor) -> IntWeight:
        generator = torch.Generator().manual_seed(weight.shape[1])
        size = group or weight.shape[1]
        shape = len(weight), weight.shape[1] // size
        codes = torch.randint(0, 2**bits, weight.shape, generator=generator).to(torch.uint8)
        scale = torch.rand(shape, generator=generator) * 0.6 / 2**bits
        zero = torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
        places = torch.randperm(weight.shape[1], generator=generator) if order else None
        return IntWeight.pack(codes, scale, zero if has_zero else None, bits, places)

    return of


def level(weight: Tensor) -> IntWeight:
    """Zeros that are no whole numbers, as GGUF has them."""
    made: IntWeight = whole_numbers(4, 32, True, False)(weight)
    assert made.zero is not None
    return replace(made, zero=made.zero.float() + 0.3)


def level_of_8(weight: Tensor) -> IntWeight:
    """As `level`, of codes of 5 bits in 8."""
    made: IntWeight = whole_numbers(8, 32, True, False)(weight)
    assert made.zero is not None
    return replace(made, codes=made.codes & 31, zero=made.zero.float() / 9, scale=made.scale * 9)


# Name -> format, and what packs one expert's weight.
CASES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "fp8, a scale": ("fp8", fp8(0, 0, Fp8Input())),
    "fp8, a scale a row": ("fp8", fp8(1, 0, Fp8Input())),
    "fp8, published scale": ("fp8", fp8(0, 0, Fp8Input(torch.tensor([0.01])))),
    "fp8, blocks": ("fp8", fp8(32, 32, Fp8Input(group=32))),
    "fp8, uneven blocks, inputs as they are": ("fp8", fp8(48, 64, None)),
    "4 bits": ("int", whole_numbers(4, 32, False, False)),
    "4 bits, a scale a row": ("int", whole_numbers(4, 0, False, False)),
    "4 bits, zeros, in another order": ("int", whole_numbers(4, 32, True, True)),
    "4 bits, zeros between": ("int", level),
    "8 bits, a scale for 16 columns": ("int", whole_numbers(8, 16, False, False)),
    "8 bits, zeros between": ("int", level_of_8),
    "8 bits, zeros": ("int", whole_numbers(8, 32, True, False)),
    "mxfp4": ("mxfp4", lambda weight: mxfp4.Mxfp4Weight.of(*mxfp4.quantise(weight))),
}


def draw(count: int, rows: int, columns: int, pack: Callable[[Tensor], Any]) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(count + rows)
    for _ in range(count):
        yield pack(0.3 * torch.randn(rows, columns, generator=generator))


def stacked(name: str, count: int, rows: int, columns: int, device: torch.device) -> PackedExperts:
    """Of random weights."""
    place, pack = CASES[name]
    form = load_place(EXPERT_FORMATS[place])
    made = PackedExperts.of(form, count, draw(count, rows, columns, pack))
    assert made is not None
    given = made.input
    if given is not None and given.scale is not None:
        given = replace(given, scale=given.scale.to(device))
    tensors = {name: tensor.to(device) for name, tensor in made.tensors.items()}
    return replace(made, tensors=tensors, input=given)


def make(name: str, count: int, device: torch.device, **options: Any) -> PackedExpertWeights:
    down = stacked(name, count, HIDDEN, INNER, device)
    return PackedExpertWeights(stacked(name, count, 2 * INNER, HIDDEN, device), down, **options)


def dense(weights: PackedExpertWeights) -> ExpertWeights:
    count = range(weights.num_experts)
    both = (
        torch.stack([matrix.one(e).dequantised() for e in count])
        for matrix in (weights.gate_up, weights.down)
    )
    rest = weights.gate_up_bias, weights.down_bias, weights.activation, weights.weighs_input
    return ExpertWeights(*both, *rest)


def inputs(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(device)


def assert_near(found: Tensor, expected: Tensor, rounds: bool = False) -> None:
    """rounds: inputs to FP8, of which a few fall on the other side of a middle: sums of the first
    product are added up in another order."""
    if rounds:
        assert float((found - expected).norm() / expected.norm()) < 0.02
    else:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 70])
def test_parts_fill_the_room_that_is_made_for_them(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows two an expert."""
    weights, picked, x = make("mxfp4", 5, device), choose(rows, 5, 2, device), inputs(rows, device)
    tiles = replace(packed_triton.tiles_of(weights, rows, 2), parts=2)
    monkeypatch.setattr(packed_triton, "tiles_of", lambda *_: tiles)
    room = room_for_parts(x, 2, weights, 1, backend="triton")
    assert room is not None
    room[-1] = 7.0
    found = experts(x, picked, weights, room, backend="triton")
    assert torch.equal(room[-1], torch.full_like(x, 7.0))
    assert found.data_ptr() == room.data_ptr()
    assert len(room) - 1 == len(found) == (4 if rows == 1 else 2)
    assert torch.equal(found, experts(x, picked, weights, backend="triton"))


@pytest.mark.parametrize(("name", "rows"), each_value(1, CASES, [1, 9]))
def test_triton_equals_the_reference(name: str, rows: int, device: torch.device) -> None:
    """Fewer slots than experts, or more; each format with the other in make test-all."""
    weights, picked = make(name, 5, device), choose(rows, 5, 2, device)
    x = inputs(rows, device)
    expected = experts(x, picked, weights, backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    assert float(expected.abs().max()) > 0.01
    assert_near(found, expected, weights.down.input is not None)


@pytest.mark.parametrize("name", ["fp8, blocks", "4 bits, zeros, in another order", "mxfp4"])
def test_many_rows_are_sorted_by_expert(name: str, device: torch.device) -> None:
    weights, picked = make(name, 4, device), choose(70, 4, 2, device)
    x = inputs(70, device)
    expected = experts(x, picked, weights, backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    assert_near(found, expected, weights.down.input is not None)


@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp4"])
def test_half_of_a_tile_has_the_sums_of_a_whole_one(name: str, device: torch.device) -> None:
    """The first row's expert has all rows, and then some that half of a tile of 64 holds."""
    weights = make(name, 4, device)
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(40, 1)
    x, share = inputs(80, device), torch.full((80, 2), 0.5).to(device)
    found = []
    for others in (torch.tensor([0, 1]), torch.tensor([2, 3])):
        ids[20:] = others
        picked = Chosen(ids.int().to(device), share)
        found.append(experts(x, picked, weights, backend="triton"))
    assert torch.equal(summed(found[0])[0], summed(found[1])[0])


@pytest.mark.parametrize("name", ["fp8, a scale a row", "4 bits"])
def test_one_expert_of_more_rows_than_a_tile(name: str, device: torch.device) -> None:
    weights, picked = make(name, 5, device), choose(40, 5, 2, device, skew=0.0)
    x = inputs(40, device)
    expected = experts(x, picked, weights, backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    assert_near(found, expected, weights.down.input is not None)


@pytest.mark.parametrize("weighs", [False, True])
def test_biases_and_activations_are_those_of_dense_experts(
    weighs: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    biases = (torch.randn(4, 2 * INNER, generator=generator), torch.randn(4, HIDDEN))
    options = {
        "gate_up_bias": biases[0].to(device),
        "down_bias": biases[1].to(device),
        "activation": Activation("clamped", 1.7, 0.4),
        "weighs_input": weighs,
    }
    weights, picked = make("mxfp4", 4, device, **options), choose(5, 4, 2, device)
    x = inputs(5, device)
    expected = experts(x, picked, dense(weights), backend="torch")
    for backend in ("torch", "triton"):
        found = summed(experts(x, picked, weights, backend=backend))  # type: ignore[arg-type]
        assert_near(found, expected)


def test_widened_weights_are_exact(device: torch.device) -> None:
    weights = make("mxfp4", 3, device)
    wide = weights.down.format.wide
    assert wide is not None
    for matrix in (weights.gate_up, weights.down):  # columns that fill no chunk
        expected = torch.stack([matrix.one(e).dequantised() for e in range(3)])
        assert torch.equal(wide.widen(matrix, torch.bfloat16).float(), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_very_many_rows_take_widened_weights(
    has_bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert has no rows."""
    monkeypatch.setattr(widened_triton, "has_warpgroups", lambda x: True)
    for module in (widened_triton, experts_triton):
        monkeypatch.setattr(module, "PART_ROWS", 80)
    options: dict[str, Any] = {"activation": Activation("clamped", 1.7, 0.4)} if has_bias else {}
    for name, rows in (("gate_up_bias", 2 * INNER), ("down_bias", HIDDEN)) if has_bias else ():
        options[name] = torch.randn(5, rows, generator=torch.Generator().manual_seed(1)).to(device)
    weights, picked = make("mxfp4", 5, device, **options), choose(90, 4, 2, device)
    form = weights.down.format
    assert form.wide is not None
    few = replace(form, wide=replace(form.wide, least_rows=90 * 2 / 5))
    weights = replace(weights, down=replace(weights.down, format=few))
    x = inputs(90, device).bfloat16()
    assert widened_triton.takes(x, picked, weights)
    assert not widened_triton.takes(
        x[:89], Chosen(*(one[:89] for one in vars(picked).values())), weights
    )
    expected = experts(x.float(), picked, dense(weights), backend="torch")
    found = experts(x, picked, weights, backend="triton").float()
    assert float((found - expected).norm() / expected.norm()) < 0.02  # bfloat16


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("fp8")])
def test_reference_is_the_dense_product(name: str) -> None:
    cpu = torch.device("cpu")
    weights, picked = make(name, 3, cpu), choose(4, 3, 2, cpu)
    expected = experts(inputs(4, cpu), picked, dense(weights), backend="torch")
    found = experts(inputs(4, cpu), picked, weights, backend="torch")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "count"), [(9, 4), (70, 40)])
def test_inputs_are_rounded_where_they_are_multiplied(
    rows: int, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, and rows that are sorted by expert, few an expert. Inputs are numbers that rounding
    leaves as they are, so that the interpreter does too; but they have other scales a group, which
    must find their sums."""
    monkeypatch.setattr(packed_triton, "ROUNDS_INSIDE", True)
    if device.type == "cpu":  # of float32 a card rounds before
        monkeypatch.delattr(packed_triton, "quantise_rows")
    weights = PackedExpertWeights(
        stacked("fp8, blocks", count, 2 * INNER, HIDDEN, device),
        stacked("4 bits", count, HIDDEN, INNER, device),
    )
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-7, 8, (rows, HIDDEN // 32, 32), generator=generator)
    codes[:, :, 5] = 7
    x = (codes * torch.tensor([0.01, 0.5, 0.03])[:, None] * 64 / 448).view(rows, HIDDEN).to(device)
    picked = choose(rows, count, 2, device)
    expected = experts(x, picked, dense(weights), backend="torch")
    found = summed(experts(x, picked, weights, backend="triton"))
    assert_near(found, expected)


@pytest.mark.parametrize("name", ["fp8, blocks", "4 bits", "mxfp4"])
def test_a_row_does_not_depend_on_others(name: str, device: torch.device) -> None:
    weights, picked = make(name, 6, device), choose(7, 6, 2, device)
    x = inputs(7, device)
    together = experts(x, picked, weights, backend="triton")
    one = Chosen(picked.ids_TK[3:4], picked.weights_TK[3:4])
    alone = experts(x[3:4], one, weights, backend="triton")
    assert torch.equal(alone[:, 0], together[:, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [3, 70])
def test_bfloat16_on_a_gpu_equals_the_reference(name: str, rows: int) -> None:
    cuda = torch.device("cuda")
    weights, picked = make(name, 6, cuda), choose(rows, 6, 2, cuda)
    x = inputs(rows, cuda).bfloat16()
    expected = experts(x, picked, weights, backend="torch").float()
    found = summed(experts(x, picked, weights, backend="triton")).float()
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_sorted_rows_are_rounded_inside_as_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 experts with few rows each, in tiles of their own."""
    weights, picked = make("fp8, blocks", 40, device), choose(70, 40, 2, device)
    assert packed_triton.tiles_of(weights, 70, 2).down.outs == 256
    x = inputs(70, device).bfloat16()
    expected = experts(x, picked, weights, backend="torch").float()
    inside = experts(x, picked, weights, backend="triton")
    assert float((summed(inside).float() - expected).norm() / expected.norm()) < 0.02
    monkeypatch.setattr(packed_triton, "ROUNDS_INSIDE", False)
    assert torch.equal(experts(x, picked, weights, backend="triton"), inside)


def test_tiles_of_float32_have_the_rows_that_registers_hold() -> None:
    """128 rows of MXFP4 by four warps are too many (test_forms_for_hopper.py)."""
    for name in EXPERT_FORMATS:
        for _, tiles in load_place(EXPERT_FORMATS[name]).tiles.many:
            held = tiles.held(4)
            assert tiles.held(2) == tiles
            assert (
                held.gate_up.rows
                == held.down.rows
                == min(tiles.gate_up.rows, 16 * tiles.gate_up.warps)
            )


def test_experts_that_differ_in_form_are_not_stacked() -> None:
    form = load_place(EXPERT_FORMATS["fp8"])
    weight = torch.randn(64, 64)
    forms = [fp8(1, 0, Fp8Input()), fp8(0, 0, Fp8Input())]
    assert PackedExperts.of(form, 2, (pack(weight) for pack in forms)) is None


def test_largest_published_scale_serves_all_experts() -> None:
    form = load_place(EXPERT_FORMATS["fp8"])
    packs = [fp8(0, 0, Fp8Input(torch.tensor([scale]))) for scale in (0.2, 0.7, 0.1)]
    made = PackedExperts.of(form, 3, (pack(torch.randn(8, 32)) for pack in packs))
    assert made is not None
    assert made.input is not None
    assert made.input.scale is not None
    assert made.input.scale.tolist() == pytest.approx([0.7])


def test_bytes_are_those_of_the_codes_and_scales() -> None:
    """Of MXFP4 those of whole chunks of columns."""
    cpu = torch.device("cpu")
    made = stacked("mxfp4", 4, 128, 96, cpu)
    assert made.num_bytes == 4 * 128 * (128 // 2 + 128 // 32)
    assert made.shape == (4, 128, 96)
    assert stacked("4 bits", 4, 128, 96, cpu).num_bytes == 4 * 128 * (96 // 2 + 4 * 96 // 32)


def test_experts_that_a_format_does_not_arrange_are_not_stacked() -> None:
    form = load_place(EXPERT_FORMATS["mxfp4"])
    blocks, scales = mxfp4.quantise(torch.randn(2, 16, 64))
    given = [mxfp4.Mxfp4Weight.of(*pair) for pair in zip(blocks, scales, strict=True)]
    assert PackedExperts.of(form, 2, iter(given)) is not None
    beyond = replace(given[1], scale=given[1].scale + 50)
    for pair in ([beyond, given[1]], [given[0], beyond]):
        assert PackedExperts.of(form, 2, iter(pair)) is None


@pytest.mark.parametrize(
    ("parts", "columns", "turns", "dtype"),
    each_value(
        1, [(1, 128, 2), (2, 128, 1), (2, 256, 4), (3, 512, 9)], [torch.float32, torch.float16]
    ),
)
def test_mxfp4_sums_are_whole_whatever_parts_steps_and_turns(
    parts: int, columns: int, turns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Columns are one and a quarter of chunks, and two and a quarter; tiles of outputs are nine,
    and two and a half. Sizes in both types: make test-all."""
    pack = CASES["mxfp4"][1]
    form = load_place(EXPERT_FORMATS["mxfp4"])
    generator = torch.Generator().manual_seed(4)
    made = []
    for rows, wide in ((2 * 288, 160), (160, 288)):
        of = (pack(torch.randn(rows, wide, generator=generator) / wide**0.5) for _ in range(2))
        one = PackedExperts.of(form, 2, of)
        assert one is not None
        tensors = {name: tensor.to(device) for name, tensor in one.tensors.items()}
        made.append(replace(one, tensors=tensors))
    weights, picked = PackedExpertWeights(*made), choose(2, 2, 2, device)
    x = torch.randn(2, 160, generator=generator).to(device, dtype)
    expected = experts(x, picked, weights, backend="torch").float()
    scale = torch.finfo(dtype).bits // 16  # columns of a tile are those of half precision
    usual = Tile(16, 32, columns * scale, 4, 2, turns, registers=128)
    tiles = Tiles(usual, replace(usual, outs=64), parts)
    found = experts_triton.experts(x, picked, weights, tiles)
    assert found.shape == (2 * parts, 2, 160)
    near = 1e-5 if dtype == torch.float32 else 3e-3
    assert float((found.sum(0) - expected).norm() / expected.norm()) < near


@pytest.mark.slow
def test_all_formats_compile_for_hopper(triton_cache: Path) -> None:
    """The interpreter takes what the compiler does not, and has no end of shared memory."""
    found = offline_triton.run(
        "tests.kernels.offline_packed_experts", triton_cache, "2", "20", "70", "600"
    )
    widened = {"_widen_kernel", "_activate_kernel", "_weigh_kernel"}
    assert {"_few_kernel", "_many_kernel"} | widened <= set(found)
    assert max(found.values()) <= MOST_SHARED


def test_rows_that_were_rounded_before_are_not_rounded_again(device: torch.device) -> None:
    weights, x = make("fp8, a scale a row", 4, device), inputs(3, device)
    chosen = choose(3, 4, 2, device)
    expected = summed(experts(2.0 * x, chosen, weights, backend="triton"))
    codes, scale = fp8_linear_ref.quantise_rows(2.0 * x, Fp8Input())
    found = summed(experts(put_beside(x, codes, scale), chosen, weights, backend="triton"))
    assert_near(found, expected, rounds=True)
    other = make("fp8, blocks", 4, device)
    plain = summed(experts(x.clone(), chosen, other, backend="triton"))
    assert torch.equal(summed(experts(x, chosen, other, backend="triton")), plain)
