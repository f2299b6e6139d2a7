"""The tail of a decoder layer on a GPU, against PyTorch (test_layer_tail_emulated.py: on a CPU)."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.linear import layer_tail_cuda
from specengine.kernels.linear.layer_tail import fits
from specengine.kernels.linear.types import MOST_TAIL_ROWS
from tests.device import ON_HOPPER
from tests.kernels.half_precision import close
from tests.kernels.layer_tail_cases import Case, Layer, rows_of

WIDE = Case(4096, 4096, 14336, 6144)
ODD = Case(2560, 1984, 6912, 2624, bias=True)
LAST = Case(5120, 8192, 320, 0)
OTHER = Case(2560, 4096, 9728, 6144, bias=True)
LARGE = Case(5120, 8192, 25600, 0)  # a cluster's gates are more than it takes at once
SMALL = Case(2304, 2304, 2304, 2304)  # stays in L2: the ring fills at once

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("seeded")]


FEW = [(case, rows) for case in (WIDE, ODD, LAST) for rows in (1, 3, 8)]
DOZENS = [(case, rows) for case in (WIDE, OTHER, LARGE, SMALL) for rows in (9, 16, 17, 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "rows"), FEW + DOZENS, ids=str)
def test_it_gives_what_single_operations_give(case: Case, rows: int, dtype: torch.dtype) -> None:
    layer = Layer.draw(case, "cuda", dtype)
    heads, stream = rows_of(case, rows, "cuda", dtype)
    assert fits(stream, layer.weights)
    for _ in range(3):
        given, expected = layer.run(heads, stream, "cuda"), layer.run(heads, stream, "torch")
        close(given.stream, expected.stream)
        if given.qkv is not None and expected.qkv is not None:
            close(given.qkv, expected.qkv)
    assert not layer_tail_cuda._counters(stream.device).any()


@pytest.mark.parametrize(
    ("case", "rows"), [(WIDE, MOST_TAIL_ROWS + 1), (ODD, 9), (LAST, 16)], ids=str
)
def test_other_rows_and_sizes_are_left_to_single_operations(case: Case, rows: int) -> None:
    layer = Layer.draw(case, "cuda")
    heads, stream = rows_of(case, rows, "cuda")
    assert not fits(stream, layer.weights)
    with pytest.raises(ValueError, match=r"too many|multiples"):
        layer.run(heads, stream, "cuda")


@pytest.mark.parametrize(
    ("rows", "parts"), [(8, [(0, 1), (1, 8), (5, 7)]), (32, [(0, 9), (3, 20), (15, 32)])], ids=str
)
def test_a_row_keeps_its_bits_whatever_stands_beside_it(
    rows: int, parts: list[tuple[int, int]]
) -> None:
    layer = Layer.draw(WIDE, "cuda")
    heads, stream = rows_of(WIDE, rows, "cuda")
    whole = layer.run(heads, stream, "cuda")
    for first, end in parts:
        part = layer.run(heads[first:end], stream[first:end], "cuda")
        assert torch.equal(part.stream, whole.stream[first:end])


@pytest.mark.parametrize(
    ("case", "rows"), [(LAST, 8), (SMALL, 8), (SMALL, 16), (SMALL, 32)], ids=str
)
def test_the_same_bits_a_thousand_times(case: Case, rows: int) -> None:
    """A ring that is filled again before it has been read shows itself once in hundreds of runs."""
    layer = Layer.draw(case, "cuda", torch.float16)
    heads, stream = rows_of(case, rows, "cuda", torch.float16)
    first = layer.run(heads, stream, "cuda").stream
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (layer.run(heads, stream, "cuda").stream != first).any()
    assert int(different) == 0


@pytest.mark.parametrize("rows", [8, 16, 32])
def test_many_in_a_row_in_a_graph(rows: int) -> None:
    """Each layer reads what the last one wrote, launched before that has ended."""
    layers = [Layer.draw(WIDE, "cuda") for _ in range(3)]
    first = rows_of(WIDE, rows, "cuda")

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
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
