"""Few rows' experts in MXFP4 in CUDA C++, beside the kernel for all numbers of rows: on a GPU, or
instruction by instruction on a CPU."""

from __future__ import annotations

import pytest
import torch

from specengine.kernels.experts import experts_ref, mxfp4_cuda
from specengine.kernels.experts.mxfp4_cuda import Tile
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.experts.mxfp4_row_cuda import RowTile
from specengine.kernels.experts.types import Chosen
from tests.halves import slow_but
from tests.kernels import test_mxfp4_cuda
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close
from tests.kernels.test_mxfp4_cuda import drawn, first, made, run_on


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, mxfp4_cuda)


CASES = [(1, 7, "clamped", 320, 192), (3, 5, "silu", 320, 192), (2, 1, "clamped", 704, 1472)]


@pytest.mark.parametrize(("rows", "blocks", "name", "hidden", "inner"), slow_but(CASES[1:], CASES))
def test_few_rows_have_the_bits_of_many(
    rows: int,
    blocks: int,
    name: str,
    hidden: int,
    inner: int,
    place: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Teams that have several tiles, blocks that have those of two slots, and steps that half of a
    tile's columns do not fill."""
    monkeypatch.setattr(test_mxfp4_cuda, "HIDDEN", hidden)
    monkeypatch.setattr(test_mxfp4_cuda, "INNER", inner)
    run_on(blocks, monkeypatch)
    (x, chosen), weights = drawn(place, rows + 1), made(place, name, True)
    usual = mxfp4_cuda.experts(x, chosen, weights, Tile(3, 2, 4))
    close(usual.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))
    found = mxfp4_cuda.experts(*first(x, chosen, rows), weights, RowTile())
    assert torch.equal(found, usual[:, :rows])


def test_choices_of_no_expert_are_passed_over(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(3, monkeypatch)
    (x, chosen), weights = drawn(place, 3), made(place, "clamped", True)
    usual = mxfp4_cuda.experts(x, chosen, weights, RowTile())
    ids = chosen.ids_TK.clone()
    ids[0, 1], ids[1] = -1, 5
    found = mxfp4_cuda.experts(x, Chosen(ids, chosen.weights_TK), weights, RowTile())
    assert torch.equal(found[0, 0], usual[0, 0])
    assert torch.equal(found[:, 2], usual[:, 2])


def product(rows: int, columns: int, is_down: bool = False) -> Product:
    return Product(rows, 4, 128, columns, columns, is_down)


def test_blocks_hold_the_rows_that_they_may_read() -> None:
    """Of GPT-OSS-120B on 132 multiprocessors a block of the second product has tiles of two slots
    at most."""
    tile, row = RowTile(), 23 * 256
    alone = tile.shared_bytes(product(1, 2880, True), 1)
    assert alone - tile.shared_bytes(product(1, 2880, True), 132) == 2 * row
    assert tile.shared_bytes(product(2, 2880, True), 1) - alone == 4 * row


def test_what_the_kernel_does_not_compute_does_not_fit() -> None:
    tile = RowTile()
    assert tile.fits(product(1, 2880))
    assert tile.threads_of(product(1, 2880)) == 768
    assert not tile.fits(product(9, 2880))  # 36 slots
    assert not tile.fits(product(1, 2848))  # half of a chunk's half
    assert not tile.fits(product(1, 128))  # no second half
    assert not tile.fits(product(8, 8192, True))  # 32 rows of 16 KiB
