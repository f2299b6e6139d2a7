"""The CUDA C++ products on a CPU, instruction by instruction, against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import few_row, few_row_cuda
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.half_precision import close

EPS = 1e-5


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_row_cuda, "compiled", emulated)
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def test_norm_and_gated_activation() -> None:
    x, gain = draw(3, 520), draw(520)
    weight = draw(2 * 200, 520) * 520**-0.5
    close(
        few_row.norm_gated_linear(x, gain, EPS, weight, backend="cuda"),
        few_row.norm_gated_linear(x, gain, EPS, weight, backend="torch"),
    )


def test_residual() -> None:
    x, weight = draw(37, 528)[:, 8:], draw(36, 520) * 520**-0.5
    residual = draw(37, 40)[:, :36]
    close(
        few_row.linear_add(x, weight, residual, backend="cuda"),
        few_row.linear_add(x, weight, residual, backend="torch"),
    )
    bias = draw(36)
    close(
        few_row.linear_add(x, weight, residual, bias, backend="cuda"),
        few_row.linear_add(x, weight, residual, bias, backend="torch"),
    )


def test_rows_that_are_complete_are_multiplied_into_given_memory() -> None:
    x, weight, bias = draw(37, 520), draw(36, 520) * 520**-0.5, draw(36)
    into = torch.full((37, 36), torch.nan).bfloat16()
    found = few_row.linear(x, weight, bias, into=into, backend="cuda")
    assert found is into
    assert torch.equal(found, few_row.linear(x, weight, bias, backend="cuda"))
    assert few_row.linear(x, weight, bias, into=into, backend="torch") is not into


def test_bias_and_float_results() -> None:
    x, gain, weight, bias = draw(21, 776), draw(776), draw(130, 776), draw(130)
    close(
        few_row.norm_linear(x, gain, EPS, weight, bias, out_dtype=torch.float32, backend="cuda"),
        few_row.norm_linear(x, gain, EPS, weight, bias, backend="torch"),
    )


@pytest.mark.parametrize(
    ("rows", "eights"), [(16, 3), (80, 3), (81, 4), (96, 4), (97, 4), (112, 4), (113, 5), (256, 3)]
)
def test_blocks_are_wider_where_that_spares_a_wave(rows: int, eights: int) -> None:
    """The down projection of a 135M model on 132 multiprocessors; elsewhere blocks stay as they
    are."""
    tile = few_row_cuda.tile_for(1536, gated=False)
    alone = 132, False, False
    assert few_row_cuda.widened(tile, 576, rows, *alone) == replace(tile, eights=eights)
    small = few_row_cuda.tile_for(576, gated=False)
    assert few_row_cuda.widened(small, 576, rows, *alone) == small


def test_blocks_are_no_wider_than_registers_hold() -> None:
    """The first projection of Qwen3-30B-A3B: with its norm, five eights would not fit."""
    tile = few_row_cuda.tile_for(2048, gated=False)
    assert (tile.eights, tile.unroll) == (3, 4)
    found = [few_row_cuda.widened(tile, 5120, 1, 132, norm, False) for norm in (False, True)]
    assert [one.eights for one in found] == [5, 3]
    assert few_row_cuda.widened(tile, 4096, 1, 132, True, False).eights == 4
    gated = few_row_cuda.tile_for(2048, gated=True)
    assert few_row_cuda.widened(gated, 4096, 1, 132, False, True).eights <= 2


def test_wider_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, residual = draw(40, 1536), draw(72, 1536) * 1536**-0.5, draw(40, 72)
    narrow = few_row.linear_add(x, weight, residual, backend="cuda")
    for processors in (6, 1000):
        monkeypatch.setattr(few_row_cuda, "multiprocessors", lambda _, count=processors: count)
        wide = few_row.linear_add(x, weight, residual, backend="cuda")
        assert torch.equal(wide, narrow)


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    x, gain, weight = draw(20, 520), draw(520), draw(2 * 100, 520)
    whole = few_row.norm_gated_linear(x, gain, EPS, weight, backend="cuda")
    for rows in (1, 13):
        part = few_row.norm_gated_linear(x[:rows], gain, EPS, weight, backend="cuda")
        assert torch.equal(part, whole[:rows])
