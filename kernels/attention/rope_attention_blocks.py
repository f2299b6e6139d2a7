"""Programs of the fused attention kernel: their shape, and how many share a request's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import multiprocessors

_MAX_SPLITS = 32
_BESIDE = 8192  # bytes of shared memory for what is no key or value
_TILE = 16  # rows, the least that the matrix unit takes
_MOST_FLOAT32 = 4096  # rows x dimensions of a program: more leave the registers


@dataclass(frozen=True)
class Blocks:
    """Shape of a program: keys an iteration, warps, pipeline stages, least keys of a share.

    peels: the first keys are fetched into registers while the kernel ahead runs. Among many
    programs, that room serves better as room for more programs at once. at_once: programs that a
    multiprocessor has room for, where keys are shared among no more than these; 0 where they are
    shared among about two a multiprocessor.
    """

    keys: int
    warps: int
    stages: int
    min_share: int
    peels: bool = True
    at_once: int = 0


def blocks_for(dtype: torch.dtype, head_dim: int, groups: int, rows: int) -> Blocks:
    """Measured on an H200 (benchmarks/results: paged-attention, wide-rows, long-texts). A program
    without stages finds room beside a product of cuBLAS that has not ended, and starts before that
    has."""
    if dtype == torch.float32:
        wide = rows * head_dim > 2048
        return Blocks(32 if head_dim <= 128 else 16, 8 if wide else 4, 1, 128, peels=not wide)
    if head_dim > 128:
        return Blocks(32, 4, 2, 128)
    if head_dim > 64 and rows <= 32:
        if groups <= 16:
            return Blocks(128, 8 if groups <= 8 else 4, 1, 128)
        if groups <= 64:
            return Blocks(64, 4, 1, 64, at_once=3)
        if groups <= 192:
            return Blocks(64, 4, 3, 64, peels=False, at_once=3)
        if groups < 512:
            return Blocks(128, 4, 2, 1024)
        keys, warps = (64, 4) if groups < 1280 else (32, 2)
        return Blocks(keys, warps, 2, 128, peels=False)
    if head_dim > 64 and groups >= 256:
        return Blocks(64, 4, 2, 128)
    if head_dim <= 64 and rows <= 32:
        # From about two programs a multiprocessor on, where no keys are split.
        if groups < 249:
            return Blocks(128, 4, 1, 128)
        keys, warps = (128, 4) if groups < 512 else (64, 2)
        return Blocks(keys, warps, 3, 128, peels=False)
    return Blocks(128, 8 if head_dim > 64 and groups < 32 else 4, 2, 128)


def within(blocks: Blocks, row_bytes: int, shared: int) -> Blocks:
    """The same with fewer stages, or else fewer keys, where keys and values of all stages would
    not fit. row_bytes: of a key. shared: bytes that a program may have."""
    while 2 * blocks.stages * blocks.keys * row_bytes > shared - _BESIDE:
        if blocks.stages == 1 and blocks.keys <= _TILE:
            break
        if blocks.stages > 1:
            blocks = replace(blocks, stages=blocks.stages - 1)
        else:
            blocks = replace(blocks, keys=blocks.keys // 2)
    return blocks


def rows_for(
    dtype: torch.dtype, head_dim: int, groups: int, wanted: int, device: torch.device
) -> int:
    """Rows of a program, of the `wanted` (queries x query heads) of each group; a power of 2 of at
    least 16. Among few programs tiles of 16 are the faster, but for long texts of eight requests,
    where splits of the keys serve better (benchmarks/results, tree-rows); measured with heads of
    64 in half precision."""
    tiles = triton.cdiv(wanted, _TILE)
    if head_dim <= 64 and dtype != torch.float32 and groups * tiles <= _tiled_programs(device):
        return _TILE
    rows = triton.next_power_of_2(wanted)
    if dtype == torch.float32:
        rows = min(rows, _MOST_FLOAT32 // triton.next_power_of_2(head_dim))
    return int(max(_TILE, rows))


def _tiled_programs(device: torch.device) -> int:
    """At most, of all requests, heads and tiles."""
    return int(multiprocessors(device) * 0.6)


def choose_splits(batch: PagedBatch, groups: int, blocks: Blocks, device: torch.device) -> int:
    """Enough programs for about two a multiprocessor, or as many as run at once, none with fewer
    keys than the least share."""
    if batch.counters is None or groups > batch.counters.numel():
        return 1
    wanted = triton.cdiv(2 * multiprocessors(device) - groups // 16, groups)
    if blocks.at_once:
        wanted = blocks.at_once * multiprocessors(device) // groups
    return int(max(1, min(wanted, _MAX_SPLITS, batch.max_keys // blocks.min_share)))
