"""The tail of a decoder layer (CUDA C++) on a CPU, instruction by instruction, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.linear import layer_tail_cuda
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.half_precision import close
from tests.kernels.layer_tail_cases import Case, Layer, rows_of

BLOCKS = 3


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_tail_cuda, "compiled", emulated)
    monkeypatch.setattr(layer_tail_cuda, "multiprocessors", lambda device: BLOCKS)
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(192, 128, 576, 320), 3),
        (Case(576, 64, 128, 208, bias=True), 13),
        (Case(128, 640, 64, 0), 16),
    ],
    ids=str,
)
def test_it_gives_what_single_operations_give(case: Case, rows: int) -> None:
    layer = Layer.draw(case, "cpu")
    heads, stream = rows_of(case, rows, "cpu")
    given, expected = layer.run(heads, stream, "cuda"), layer.run(heads, stream, "torch")
    close(given.stream, expected.stream)
    assert (given.qkv is None) == (expected.qkv is None)
    if given.qkv is not None and expected.qkv is not None:
        close(given.qkv, expected.qkv)
    assert not layer_tail_cuda._counters(torch.device("cpu")).any()


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    case = Case(192, 128, 128, 64)
    layer = Layer.draw(case, "cpu")
    heads, stream = rows_of(case, 11, "cpu")
    whole = layer.run(heads, stream, "cuda")
    part = layer.run(heads[3:5], stream[3:5], "cuda")
    assert whole.qkv is not None
    assert part.qkv is not None
    assert torch.equal(part.stream, whole.stream[3:5])
    assert torch.equal(part.qkv, whole.qkv[3:5])


def test_too_many_rows_are_refused() -> None:
    case = Case(64, 64, 64, 0)
    with pytest.raises(ValueError, match="too many"):
        Layer.draw(case, "cpu").run(*rows_of(case, 17, "cpu"), "cuda")
