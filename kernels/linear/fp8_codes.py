"""What kernels of FP8 codes on both sides share: which products they compute, and in how many parts
the columns are multiplied of up to 64 rows. A row's sum has their order, so that they depend on the
weight alone."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import Fp8Weight
from specengine.kernels.sizes import cdiv

MANY_OUTS = 16384  # outputs that fill the processor without being split
BLOCK = 128  # columns that share a scale, in the published form
_OUTS, _PROGRAMS = 64, 128  # outputs of a program, and programs that nearly fill the processor
MOST_SPLITS, _LEAST_COLUMNS = 4, 512


def computes(x: Tensor, weight: Fp8Weight) -> bool:
    """Half precision, a scale for a row on both sides, or one for 128 columns; rows of codes of
    whole 16 bytes."""
    columns, given = weight.shape[1], weight.input
    if given is None or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_by_row = weight.columns >= columns and given.group is None
    is_by_block = weight.columns == given.group == BLOCK < columns
    fits = columns % (BLOCK if is_by_block else 16) == 0 and weight.codes.data_ptr() % 16 == 0
    return (is_by_row or is_by_block) and fits and weight.codes.is_contiguous()


def splits_by_row(outs: int) -> int:
    """Where a row of the weight has one scale."""
    if outs >= MANY_OUTS:
        return 1
    return 2 if outs > 2048 else 4


def splits_by_block(outs: int, columns: int) -> int:
    """Where blocks of it have: as few, of no fewer than 512 columns, as leave 128 multiprocessors a
    program each, or nearly. As swept at the layers of an 8B and of Qwen3-Next on an H200
    (benchmarks/kernels/fp8_products.py, hybrid_products.py)."""
    splits = 1
    while splits < MOST_SPLITS and splits * cdiv(outs, _OUTS) < _PROGRAMS:
        splits *= 2
    while splits > 1 and splits * _LEAST_COLUMNS > columns:
        splits //= 2
    return splits
