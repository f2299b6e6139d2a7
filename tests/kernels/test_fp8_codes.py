"""Products of FP8 codes on both sides in Triton: against the reference, beside the kernels of other
rows, and what the kernel leaves to others. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import fp8_codes_triton, fp8_linear_cuda, fp8_linear_ref
from specengine.kernels.linear import fp8_linear as fp8_linear_form
from specengine.kernels.linear.fp8_codes import BLOCK, computes
from specengine.kernels.linear.fp8_codes_triton import tile_by_block, tile_by_row
from specengine.kernels.linear.fp8_linear import fp8_linear, fp8_parts
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight
from specengine.kernels.linear.split_sum_triton import Tile, counters_of, rows_block

OUTS, COLUMNS = 200, 640  # that no program and no pair of blocks divides
KINDS = ("tensor", "row", "block", "block a row")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(
    kind: str, device: torch.device, outs: int = OUTS, columns: int = COLUMNS
) -> Fp8Weight:
    if kind == "block a row":  # as rows are when they were reordered across blocks
        return weight_of("block", device, outs, columns).by_row()
    forms = {
        "tensor": (outs, columns, Fp8Input(torch.tensor([0.01], device=device))),
        "row": (1, columns, Fp8Input()),
        "block": (BLOCK, BLOCK, Fp8Input(group=BLOCK)),
    }
    rows, shared, form = forms[kind]
    scale = draw(-(-outs // rows), -(-columns // shared)).abs() / 100
    codes = (60 * draw(outs, columns, seed=1)).to(torch.float8_e4m3fn)
    return Fp8Weight(codes.to(device), scale.to(device), rows, shared, form)


def multiply(
    x: Tensor, weight: Fp8Weight, tile: Tile | None = None, bias: Tensor | None = None
) -> Tensor:
    assert weight.input is not None
    rounded = fp8_linear_ref.quantise_rows(x, weight.input)
    return fp8_codes_triton.fp8_linear(*rounded, weight, bias, x.dtype, tile)


def tiles(kind: str) -> list[Tile]:
    columns = BLOCK if kind.startswith("block") else 256
    return [Tile(outs, columns, splits, 4, 2, rows=rows) for outs, splits, rows in TILES]


TILES = [(64, 1, 64), (128, 2, 64), (64, 4, 128)]  # the last of four splits has no columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 70])
def test_products_equal_the_reference(kind: str, rows: int, device: torch.device) -> None:
    weight = weight_of(kind, device)
    x = draw(rows, COLUMNS, seed=2).to(device, torch.float16)
    bias = draw(OUTS, seed=3).to(device, torch.float16)
    expected = fp8_linear(x, weight, bias, backend="torch").float()
    for tile in tiles(kind):
        found = multiply(x, weight, tile, bias)
        assert found.dtype == x.dtype
        assert float((found.float() - expected).abs().max() / expected.abs().max()) < 3e-3
        assert torch.equal(multiply(x[-1:], weight, tile, bias)[0], found[-1]), "a row alone"
    assert not counters_of(x.device).any()


@pytest.mark.parametrize("outs", [576, 2048, 4096, 6144, 28672])
@pytest.mark.parametrize("columns", [512, 2048, 7168, 14336])
def test_sums_have_one_order_for_all_numbers_of_rows(outs: int, columns: int) -> None:
    by_row = [tile_by_row(outs, rows) for rows in range(1, 65)]
    by_block = [tile_by_block(outs, columns, rows) for rows in range(1, 65)]
    for given in (by_row, by_block):
        assert len({(tile.columns, tile.splits) for tile in given}) == 1
    in_cuda = [
        fp8_linear_cuda.tile_for(outs, columns, is_by_block) for is_by_block in (False, True)
    ]
    assert [tile.splits for tile in in_cuda] == [by_row[0].splits, by_block[0].splits]


@pytest.mark.parametrize(
    ("shape", "splits", "prefetches"),
    [
        ((12288, 2048), 1, False),
        ((9216, 2048), 1, False),
        ((2048, 4096), 4, True),
        ((1024, 2048), 4, True),
        ((2048, 512), 1, True),
        ((4096, 7168), 2, False),  # DeepSeek-V3's shared experts
    ],
)
def test_products_in_blocks_are_split_and_prefetched_by_shape(
    shape: tuple[int, int], splits: int, prefetches: bool
) -> None:
    for rows in (1, 64):
        tile = tile_by_block(*shape, rows)
        assert (tile.splits, tile.prefetches) == (splits, prefetches)


@pytest.mark.parametrize("outs", [576, 2048, 4096, 6144, 28672])
@pytest.mark.parametrize("columns", [512, 2048, 7168, 14336])
def test_tiles_fit_in_shared_memory(outs: int, columns: int) -> None:
    for rows in (1, 17, 33, 65, 129, 256):
        for tile in (tile_by_row(outs, rows), tile_by_block(outs, columns, rows)):
            held = tile.stages * tile.columns * (tile.outs + rows_block(rows, tile.rows))
            assert held <= 220 << 10


@pytest.mark.parametrize("kind", ["block", "block a row"])
def test_parts_have_the_bits_of_their_sum(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added up in their order, and rounded once."""
    weight = weight_of(kind, device, columns=2048)
    x = draw(5, 2048, seed=2).to(device, torch.float16)
    take_codes(monkeypatch)
    parts = fp8_parts(x, weight)
    assert parts is not None
    assert parts.shape == (4, 5, OUTS)
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal(total.half(), multiply(x, weight))


def take_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the product, in the interpreter, which rounds 7.9 to 4 in FP8."""
    monkeypatch.setattr(fp8_codes_triton, "takes", computes)
    monkeypatch.setattr(fp8_linear_form, "use_triton", lambda *_: True)
    monkeypatch.setattr(
        fp8_linear_form, "quantise_rows", lambda x, form, **_: fp8_linear_ref.quantise_rows(x, form)
    )


def test_only_split_products_of_codes_in_blocks_have_parts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_codes(monkeypatch)
    blocks = weight_of("block", device, columns=1024)

    def count(rows: int, weight: Fp8Weight = blocks) -> int:
        parts = fp8_parts(draw(rows, weight.shape[1]).to(device, torch.float16), weight)
        return 0 if parts is None else len(parts)

    assert [count(rows) for rows in (0, 1, 64, 65)] == [0, 2, 2, 0]
    assert not count(5, weight_of("block", device)), "too few columns for two splits"
    assert not count(5, weight_of("row", device, columns=1024))
    assert not count(5, replace(blocks, input=None))
    assert not count(5, replace(blocks, columns=64, input=Fp8Input(group=64)))


@pytest.mark.parametrize("splits", [1, 3, 4])
def test_prefetching_a_weight_leaves_bits(splits: int, device: torch.device) -> None:
    """In four splits the last has no columns."""
    if device.type == "cpu":
        pytest.skip("nothing is prefetched in the interpreter")
    weight, x = weight_of("block", device), draw(5, COLUMNS).to(device, torch.bfloat16)
    tile = Tile(64, BLOCK, splits, 4, 3)
    plain, found = (multiply(x, weight, one) for one in (tile, replace(tile, prefetches=True)))
    assert torch.equal(found, plain)


@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize(
    ("outs", "columns"), [(OUTS, 2048), (OUTS, 4352), (4096, 4096), (16384, 2048)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bits_of_few_rows_are_those_of_cuda(
    has_bias: bool, outs: int, columns: int, kind: str, device: torch.device
) -> None:
    """Tiles of 64 and of 128 outputs, in one part and in several."""
    if device.type == "cpu":
        pytest.skip("a property of the processor's product")
    weight = weight_of(kind, device, outs, columns)
    x = draw(8, columns).to(device, torch.bfloat16)
    bias = draw(outs, seed=3).to(device, torch.bfloat16) if has_bias else None
    assert torch.equal(fp8_linear(x, weight, bias, backend="cuda"), multiply(x, weight, bias=bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outs", "most"), [(256, 256, 256), (257, 256, 256), (128, 4352, 128), (129, 4352, 128)]
)
def test_rows_beyond_a_measured_number_are_left_to_others(
    kind: str,
    rows: int,
    outs: int,
    most: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """most: of scales by row; in blocks they are 256."""
    take_codes(monkeypatch)
    for name in ("_scaled_product", "_dequantised_product"):
        monkeypatch.setattr(fp8_linear_form, name, lambda *_, name=name: name)
    monkeypatch.setattr(fp8_codes_triton, "fp8_linear", lambda *_: "codes")
    found = fp8_linear(
        draw(rows, 256).to(device, torch.bfloat16), weight_of(kind, device, outs, 256)
    )
    if kind in ("tensor", "row"):
        assert found == ("codes" if rows <= most else "_scaled_product")
    else:
        assert found == ("codes" if rows <= 256 else "_dequantised_product")


def test_what_the_kernel_does_not_compute_is_refused(device: torch.device) -> None:
    x = draw(2, COLUMNS).to(device, torch.bfloat16)
    for kind in KINDS:
        assert computes(x, weight_of(kind, device))
    block, row = weight_of("block", device), weight_of("row", device)
    assert not computes(x.float(), row)
    assert not computes(x, replace(row, input=None))
    assert not computes(x, replace(row, input=Fp8Input(group=BLOCK)))
    assert not computes(x, replace(block, input=Fp8Input()))
    assert not computes(x, replace(block, columns=64, input=Fp8Input(group=64)))
    assert not computes(x[:, :632], weight_of("row", device, columns=632)), "no whole 16 bytes"
    strided = replace(row, codes=row.codes[:, :320], columns=320)
    assert not computes(x[:, :320], strided)
    shifted = row.codes.flatten()[8 : 8 + OUTS * 320].view(OUTS, 320)
    assert not computes(x[:, :320], replace(row, codes=shifted, columns=320))
