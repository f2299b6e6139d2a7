"""The quantised weights that tiles are timed with: what they say, and which tiles are tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch

from benchmarks.kernels import packed_experts, quantised
from benchmarks.kernels.experts import Shape
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts import packed_triton
from specengine.kernels.experts.tiles import are_few

OUTS, INPUTS = 128, 256


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "CUDA", "cpu")


@pytest.mark.parametrize("name", packed_experts.FORMATS)
def test_random_expert_keeps_the_size_of_its_inputs(name: str) -> None:
    place, make = packed_experts.FORMATS[name]
    weight = make(OUTS, INPUTS, 3)
    assert isinstance(weight, load_place(EXPERT_FORMATS[place]).holds)
    assert weight.shape == (OUTS, INPUTS)
    size = float(weight.dequantised().std()) * INPUTS**0.5
    assert 2**-0.5 < size < 2**0.5, "scales of MXFP4 are powers of 2"


@pytest.mark.parametrize("name", packed_experts.FORMATS)
@pytest.mark.parametrize("rows", packed_experts.SWEPT)
def test_tiles_that_are_tried_differ_in_what_runs(name: str, rows: int) -> None:
    weights = packed_experts.pack(Shape(INPUTS, OUTS, 2, 1), name, count())
    operands = weights.down.format.operands(weights.down, torch.bfloat16, None)
    ran = []
    for tiles in packed_experts.candidates(rows, weights):
        steps = [min(one.inputs, operands.most_columns) for one in (tiles.gate_up, tiles.down)]
        ran.append(
            replace(
                tiles,
                gate_up=replace(tiles.gate_up, inputs=steps[0]),
                down=replace(tiles.down, inputs=steps[1]),
            )
        )
    assert len(ran) == len({*ran}) >= 5
    assert all((one.gate_up.rows == 16) or not are_few(rows, 8) for one in ran)


def test_switch_has_its_other_value_for_a_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "CUDA", "cpu")
    weights = packed_experts.pack(Shape(INPUTS, OUTS, 2, 1), "fp8-blocks", count())
    before = packed_triton.ROUNDS_INSIDE
    for name, value in packed_experts.switched(weights):
        assert (name, value) == ("ROUNDS_INSIDE", not before)
        assert packed_triton.ROUNDS_INSIDE is not before
    assert packed_triton.ROUNDS_INSIDE is before


WHOLE = {
    "int4": (4, 128, None),
    "int4 zeros": (4, 128, torch.uint8),
    "q4_0": (4, 32, None),
    "q4_k": (4, 32, torch.float32),
    "q8_0": (8, 32, None),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_near_the_weight(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUTS, INPUTS, dtype=torch.bfloat16)
    bits, group, zero = WHOLE[name]
    made = quantised.FORMS[name].make(weight)
    assert (made.bits, made.group, made.shape) == (bits, group, (OUTS, INPUTS))
    assert (None if made.zero is None else made.zero.dtype) == zero
    steps = made.scale.float().repeat_interleave(group, 1)
    off = ((made.dequantised() - weight.float()).abs() / steps).max()
    assert float(off) < 0.8, "half a step, and what the largest code and a zero between leave out"
    held = made.num_bytes * 8 / weight.numel()
    assert held == pytest.approx(quantised.FORMS[name].bits, rel=0.01)


@pytest.mark.parametrize("name", [n for n, form in quantised.FORMS.items() if form.tiled])
def test_form_has_tiles_that_differ_in_what_runs(name: str) -> None:
    form = quantised.FORMS[name]
    made = form.make(torch.randn(OUTS, INPUTS, dtype=torch.bfloat16))
    most = getattr(made, "group", INPUTS)
    ran = {replace(tile, columns=min(tile.columns, most)) for tile in form.tiles}
    assert len(ran) == len(form.tiles)
