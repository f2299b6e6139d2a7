"""Few rows' experts in MXFP4 in CUDA C++, beside the kernel for all numbers of rows: on a GPU, or
instruction by instruction on a CPU."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.experts import experts_ref, mxfp4_cuda, mxfp4_row_cuda
from specengine.kernels.experts.mxfp4_cuda import Both, Tile
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.experts.mxfp4_row_cuda import RowTile
from specengine.kernels.experts.types import Chosen
from tests.halves import slow_but
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close
from tests.kernels.test_mxfp4_cuda import drawn, first, made


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, mxfp4_cuda)


def run_on(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mxfp4_cuda, mxfp4_row_cuda):
        monkeypatch.setattr(module, "multiprocessors", lambda _: blocks)


CASES = [
    (1, 7, "clamped", Both(RowTile(3, 2, 2), RowTile(3, 2, 2, True))),
    (1, 1, "silu", Both(RowTile(2, 3, 2), RowTile(3, 4, 1, True))),
    (3, 5, "clamped", Both(RowTile(2, 1, 3), RowTile(2, 1, 2, True))),
    (3, 5, "clamped", Both(RowTile(2, 1, 3, parts=2), RowTile(2, 1, 2, True, 2, 2))),
    (1, 7, "silu", Both(RowTile(2, 1, 3, parts=2, spread=2), RowTile(2, 1, 2, False, 2))),
]


@pytest.mark.parametrize(("rows", "blocks", "name", "both"), slow_but(CASES[2:4], CASES))
def test_few_rows_have_the_bits_of_many(
    rows: int,
    blocks: int,
    name: str,
    both: Both,
    place: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Teams that have several tiles, blocks that have those of two slots, and steps that neither a
    tile's columns nor a part of them fill."""
    run_on(blocks, monkeypatch)
    (x, chosen), weights = drawn(place, 9), made(place, name, True)
    many = Tile(2, 3, 2, 4, parts=both.gate_up.parts)
    usual = mxfp4_cuda.experts(x, chosen, weights, many)
    close(usual.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))
    found = mxfp4_cuda.experts(*first(x, chosen, rows), weights, both)
    assert torch.equal(found, usual[:, :rows])


def test_choices_of_no_expert_are_passed_over(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(3, monkeypatch)
    (x, chosen), weights = drawn(place, 3), made(place, "clamped", True)
    both = Both(RowTile(2, 2, 2), RowTile(2, 2, 2, True))
    usual = mxfp4_cuda.experts(x, chosen, weights, both)
    ids = chosen.ids_TK.clone()
    ids[0, 1], ids[1] = -1, 5
    found = mxfp4_cuda.experts(x, Chosen(ids, chosen.weights_TK), weights, both)
    assert torch.equal(found[0, 0], usual[0, 0])
    assert torch.equal(found[:, 2], usual[:, 2])


def product(rows: int, columns: int, is_down: bool = False) -> Product:
    return Product(rows, 4, 128, columns, columns, is_down)


def test_blocks_hold_the_rows_that_they_may_read() -> None:
    """Of GPT-OSS-120B on 132 multiprocessors a block of the second product has tiles of two slots
    at most; both products' blocks fit one multiprocessor."""
    tile, row = RowTile(6, 4, 5, True), 23 * 256
    alone = tile.shared_bytes(product(1, 2880, True), 1)
    shared = tile.shared_bytes(product(1, 2880, True), 132)
    assert alone - shared == 2 * row
    assert tile.shared_bytes(product(2, 2880, True), 1) - alone == 4 * row
    first = RowTile(6, 3, 2).shared_bytes(product(1, 2880), 132)
    assert first + shared + 2 * 1024 <= 228 * 1024


def test_what_the_kernel_does_not_compute_does_not_fit() -> None:
    tile = RowTile(6, 3, 2, parts=2, spread=2)
    assert tile.fits(product(1, 2880))
    assert tile.threads_of(product(1, 2880)) == 768
    assert not tile.fits(product(9, 2880))  # 36 slots
    assert not tile.fits(product(1, 2848))  # half of a chunk's half
    assert not tile.fits(product(1, 64))  # no two parts
    assert not tile.fits(product(8, 8192, True))  # 32 rows of 16 KiB
    assert not RowTile(8, 3, 2, parts=2, spread=3).fits(product(1, 2880))
