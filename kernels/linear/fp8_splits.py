"""In how many parts the columns of an FP8 weight are multiplied, of up to 64 rows. A row's sum has
their order, so that they depend on the weight alone, and are the same for all kernels of codes."""

from __future__ import annotations

from specengine.kernels.sizes import cdiv

MANY_OUTS = 16384  # outputs that fill the processor without being split
BLOCK = 128  # columns that share a scale, in the published form
_OUTS, _PROGRAMS = 64, 128  # outputs of a program, and programs that nearly fill the processor
MOST_SPLITS, _LEAST_COLUMNS = 4, 512


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
