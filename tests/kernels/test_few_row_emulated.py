"""The CUDA C++ products on a CPU, instruction by instruction, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.kernels import few_row, few_row_cuda, few_row_wide
from specengine.kernels.dispatch import Backend
from tests.kernels.emulated_cuda import COMPILER, compiler_into

EPS = 1e-5
BLOCKS = 5

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, or not Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (few_row_cuda, few_row_wide):
        monkeypatch.setattr(module, "compiled", compiler_into(folder))
    monkeypatch.setattr(few_row_wide, "multiprocessors", lambda device: BLOCKS)
    few_row_wide._meeting.cache_clear()
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def close(actual: Tensor, expected: Tensor) -> None:
    bound = 0.02 * float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=bound)


@pytest.mark.parametrize(("backend", "rows", "hidden"), [("cuda", 3, 520), ("wide", 13, 776)])
def test_norm_and_gated_activation(backend: Backend, rows: int, hidden: int) -> None:
    x, gain = draw(rows, hidden), draw(hidden)
    weight = draw(2 * 200, hidden) * hidden**-0.5
    close(
        few_row.norm_gated_linear(x, gain, EPS, weight, backend=backend),
        few_row.norm_gated_linear(x, gain, EPS, weight, backend="torch"),
    )


@pytest.mark.parametrize(
    ("backend", "rows", "hidden", "outs"),
    [("cuda", 13, 520, 36), ("wide", 3, 1288, 300), ("wide", 8, 264, 36)],
)
def test_residual(backend: Backend, rows: int, hidden: int, outs: int) -> None:
    x, weight = draw(rows, hidden + 8)[:, 8:], draw(outs, hidden) * hidden**-0.5
    residual = draw(rows, outs)
    close(
        few_row.linear_add(x, weight, residual, backend=backend),
        few_row.linear_add(x, weight, residual, backend="torch"),
    )


@pytest.mark.parametrize("backend", ["cuda", "wide"])
def test_bias_and_float_results(backend: Backend) -> None:
    x, gain, weight, bias = draw(5, 776), draw(776), draw(130, 776), draw(130)
    close(
        few_row.norm_linear(x, gain, EPS, weight, bias, out_dtype=torch.float32, backend=backend),
        few_row.norm_linear(x, gain, EPS, weight, bias, backend="torch"),
    )


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    x, gain, weight = draw(20, 520), draw(520), draw(2 * 100, 520)
    whole = few_row.norm_gated_linear(x, gain, EPS, weight, backend="wide")
    for rows in (1, 13):
        part = few_row.norm_gated_linear(x[:rows], gain, EPS, weight, backend="wide")
        assert torch.equal(part, whole[:rows])


def test_meeting_is_left_as_it_was_found() -> None:
    few_row.linear_add(draw(2, 1288), draw(300, 1288), draw(2, 300), backend="wide")
    assert not few_row_wide._meeting(torch.device("cpu")).counters.any()


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        few_row.linear(draw(65, 64), draw(8, 64), backend="wide")
