"""The tail of a decoder layer (CUDA C++) on a CPU, instruction by instruction, against PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.kernels.linear import layer_tail_cuda
from tests.halves import thinned
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.half_precision import close
from tests.kernels.layer_tail_cases import Case, Layer, rows_of

BLOCKS = 3


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_tail_cuda, "compiled", emulated)
    monkeypatch.setattr(layer_tail_cuda, "multiprocessors", lambda device: BLOCKS)
    layer_tail_cuda._counters.cache_clear()  # a launch that failed leaves them
    torch.manual_seed(0)


def check(case: Case, rows: int) -> None:
    """Against single operations; the places where blocks meet are zeros again."""
    layer = Layer.draw(case, "cpu")
    heads, stream = rows_of(case, rows, "cpu")
    given, expected = layer.run(heads, stream, "cuda"), layer.run(heads, stream, "torch")
    close(given.stream, expected.stream)
    assert (given.qkv is None) == (expected.qkv is None)
    if given.qkv is not None and expected.qkv is not None:
        close(given.qkv, expected.qkv)
    assert not layer_tail_cuda._counters(torch.device("cpu")).any()


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(192, 128, 576, 320), 3),
        (Case(576, 64, 128, 208, bias=True), 5),
        (Case(128, 640, 64, 0), 8),
    ],
    ids=str,
)
def test_it_gives_what_single_operations_give(case: Case, rows: int) -> None:
    check(case, rows)


@pytest.mark.parametrize(
    ("case", "rows", "blocks"),
    [
        (Case(256, 128, 384, 320), 9, 2),
        (Case(384, 256, 640, 224, bias=True), 32, 4),
        (Case(256, 128, 256, 0), 17, 5),
        (Case(128, 128, 1152, 64), 20, 2),
        (Case(128, 128, 128, 1152), 9, 2),
        # an odd number of tiles, in more stages than the ring has
        (Case(1024, 128, 128, 448), 9, 2),
    ],
    ids=str,
)
def test_dozens_of_rows(
    case: Case, rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_tail_cuda, "multiprocessors", lambda device: blocks)
    check(case, rows)


@pytest.mark.parametrize(
    ("case", "rows", "some"),
    [(Case(192, 128, 128, 64), 8, slice(3, 5)), (Case(128, 128, 384, 64), 30, slice(3, 15))],
    ids=str,
)
def test_a_row_keeps_its_bits_whatever_stands_beside_it(case: Case, rows: int, some: slice) -> None:
    layer = Layer.draw(case, "cpu")
    heads, stream = rows_of(case, rows, "cpu")
    whole = layer.run(heads, stream, "cuda")
    part = layer.run(heads[some], stream[some], "cuda")
    assert whole.qkv is not None
    assert part.qkv is not None
    assert torch.equal(part.stream, whole.stream[some])
    assert torch.equal(part.qkv, whole.qkv[some])


@pytest.mark.parametrize(
    ("case", "rows", "blocks", "seeds"),
    thinned(
        2,
        [
            (Case(128, 256, 128, 64), 24, 4),  # one tile of a product: one warpgroup has none
            (Case(256, 256, 384, 320, bias=True), 9, 2),
        ],
        [range(1, 4), range(4, 7)],
    ),
    ids=str,
)
def test_dozens_of_rows_keep_their_bits_whatever_is_late(
    case: Case,
    rows: int,
    blocks: int,
    seeds: range,
    emulated: Compiled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_tail_cuda, "multiprocessors", lambda device: blocks)
    layer = Layer.draw(case, "cpu")
    heads, stream = rows_of(case, rows, "cpu")
    expected = layer.run(heads, stream, "cuda")
    for seed in seeds:
        late = lambda *given, seed=seed: replace(emulated(*given), seed=seed)  # noqa: E731
        monkeypatch.setattr(layer_tail_cuda, "compiled", late)
        given = layer.run(heads, stream, "cuda")
        assert torch.equal(given.stream, expected.stream)
        assert given.qkv is not None
        assert expected.qkv is not None
        assert torch.equal(given.qkv, expected.qkv)
        assert not layer_tail_cuda._counters(torch.device("cpu")).any()


@pytest.mark.parametrize(
    ("size", "rows", "said"), [(128, 33, "too many"), (64, 9, "multiples of 128")]
)
def test_other_rows_and_sizes_are_refused(size: int, rows: int, said: str) -> None:
    case = Case(size, size, size, 0)
    with pytest.raises(ValueError, match=said):
        Layer.draw(case, "cpu").run(*rows_of(case, rows, "cpu"), "cuda")
