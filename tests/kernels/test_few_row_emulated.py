"""The CUDA C++ products on a CPU, instruction by instruction, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.kernels import few_row, few_row_cuda
from tests.kernels.emulated_cuda import COMPILER, compiler_into

EPS = 1e-5

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, or not Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_row_cuda, "compiled", compiler_into(folder))
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def close(actual: Tensor, expected: Tensor) -> None:
    bound = 0.02 * float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=bound)


def test_norm_and_gated_activation() -> None:
    x, gain = draw(3, 520), draw(520)
    weight = draw(2 * 200, 520) * 520**-0.5
    close(
        few_row.norm_gated_linear(x, gain, EPS, weight, backend="cuda"),
        few_row.norm_gated_linear(x, gain, EPS, weight, backend="torch"),
    )


def test_residual() -> None:
    x, weight = draw(13, 528)[:, 8:], draw(36, 520) * 520**-0.5
    residual = draw(13, 36)
    close(
        few_row.linear_add(x, weight, residual, backend="cuda"),
        few_row.linear_add(x, weight, residual, backend="torch"),
    )


def test_bias_and_float_results() -> None:
    x, gain, weight, bias = draw(5, 776), draw(776), draw(130, 776), draw(130)
    close(
        few_row.norm_linear(x, gain, EPS, weight, bias, out_dtype=torch.float32, backend="cuda"),
        few_row.norm_linear(x, gain, EPS, weight, bias, backend="torch"),
    )


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    x, gain, weight = draw(20, 520), draw(520), draw(2 * 100, 520)
    whole = few_row.norm_gated_linear(x, gain, EPS, weight, backend="cuda")
    for rows in (1, 13):
        part = few_row.norm_gated_linear(x[:rows], gain, EPS, weight, backend="cuda")
        assert torch.equal(part, whole[:rows])
