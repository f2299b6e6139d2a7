"""MXFP4 in words of pairs against what a checkpoint has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.kernels.linear import mxfp4_words
from specengine.kernels.linear.mxfp4 import Mxfp4Weight, dequantise
from specengine.kernels.linear.mxfp4_words import Mxfp4Words


def draw(rows: int, columns: int, low: int = 110, high: int = 130) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(rows)
    size = rows, columns // 32
    blocks = torch.randint(0, 256, (*size, 16), generator=generator).to(torch.uint8)
    blocks[:, :, 3] = 0x71  # no block is all zeros
    return Mxfp4Weight.of(
        blocks, torch.randint(low, high, size, generator=generator).to(torch.uint8)
    )


def arranged(weight: Mxfp4Weight) -> Mxfp4Words:
    found = Mxfp4Words.of(weight)
    assert found is not None
    return found


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 128), (2064, 96), (48, 288)])
def test_words_hold_the_same_weights(rows: int, columns: int) -> None:
    weight = draw(rows, columns)
    made = arranged(weight)
    assert made.shape == (rows, columns)
    assert made.num_bytes == rows * -(-columns // 128) * (64 + 4)
    assert torch.equal(made.dequantised(), weight.dequantised())


@pytest.mark.parametrize("exponent", [42, 43, 100, 127, 167, 168])
def test_pair_times_factor_is_the_weight_in_bfloat16(exponent: int) -> None:
    """What a Triton program computes of a word, in the same type."""
    codes = torch.arange(16)
    pair = ((codes >> 3) << 15 | (codes & 7) << 6).to(torch.int16).view(torch.bfloat16)
    factor = torch.tensor(exponent + 126 - mxfp4_words.SHIFT << 7).to(torch.int16)
    found = pair * factor.view(torch.bfloat16)
    blocks = (codes | codes << 4).to(torch.uint8)[None, None]
    scale = torch.tensor([[exponent]], dtype=torch.uint8)
    expected = dequantise(blocks, scale)[0, ::2] * 2.0**-mxfp4_words.SHIFT
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("exponent", [41, 169, 255])
def test_scale_beyond_those_of_exact_products_is_refused(exponent: int) -> None:
    weight = draw(16, 64)
    scale = weight.scale.clone()
    scale[5, 1] = exponent
    assert Mxfp4Words.of(replace(weight, scale=scale)) is None


def test_scale_of_a_block_of_zeros_does_not_matter() -> None:
    weight = draw(16, 64)
    codes, scale = weight.codes.clone(), weight.scale.clone()
    codes[:, 16:] = 0x80  # zeros of either sign
    scale[:, 1] = 0
    made = replace(weight, codes=codes, scale=scale)
    assert torch.equal(arranged(made).dequantised(), made.dequantised())


def test_rows_that_fill_no_pair_of_units_are_refused() -> None:
    assert Mxfp4Words.of(draw(24, 64)) is None
