"""The tail of a decoder layer on a GPU, against PyTorch (test_layer_tail_emulated.py: on a CPU)."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.linear import layer_tail_cuda
from specengine.kernels.linear.layer_tail import MAX_ROWS, fits
from tests.device import ON_HOPPER
from tests.kernels.half_precision import close
from tests.kernels.layer_tail_cases import Case, Layer, rows_of

WIDE = Case(4096, 4096, 14336, 6144)
ODD = Case(2560, 1984, 6912, 2624, bias=True)
LAST = Case(5120, 8192, 320, 0)
SMALL = Case(2304, 2304, 2304, 2304)  # stays in L2: the ring fills at once

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("seeded")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("case", [WIDE, ODD, LAST], ids=str)
def test_it_gives_what_single_operations_give(case: Case, rows: int, dtype: torch.dtype) -> None:
    layer = Layer.draw(case, "cuda", dtype)
    heads, stream = rows_of(case, rows, "cuda", dtype)
    assert fits(stream, layer.weights) == (rows <= MAX_ROWS)
    for _ in range(3):
        given, expected = layer.run(heads, stream, "cuda"), layer.run(heads, stream, "torch")
        close(given.stream, expected.stream)
        if given.qkv is not None and expected.qkv is not None:
            close(given.qkv, expected.qkv)
    assert not layer_tail_cuda._counters(stream.device).any()


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    layer = Layer.draw(WIDE, "cuda")
    heads, stream = rows_of(WIDE, 16, "cuda")
    whole = layer.run(heads, stream, "cuda")
    for first, end in ((0, 1), (2, 9), (5, 15)):
        part = layer.run(heads[first:end], stream[first:end], "cuda")
        assert torch.equal(part.stream, whole.stream[first:end])


@pytest.mark.parametrize("case", [LAST, SMALL], ids=str)
def test_the_same_bits_a_thousand_times(case: Case) -> None:
    """A ring that is filled again before it has been read shows itself once in hundreds of runs."""
    layer = Layer.draw(case, "cuda", torch.float16)
    heads, stream = rows_of(case, 16, "cuda", torch.float16)
    first = layer.run(heads, stream, "cuda").stream
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (layer.run(heads, stream, "cuda").stream != first).any()
    assert int(different) == 0


def test_many_in_a_row_in_a_graph() -> None:
    """Each layer reads what the last one wrote, launched before that has ended."""
    layers = [Layer.draw(WIDE, "cuda") for _ in range(3)]
    first = rows_of(WIDE, 8, "cuda")

    def chain() -> torch.Tensor:
        heads, stream = first
        for layer in layers * 4:
            tail = layer.run(heads, stream, "cuda")
            assert tail.qkv is not None
            heads, stream = tail.qkv[:, : WIDE.heads], tail.stream
        return stream

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
