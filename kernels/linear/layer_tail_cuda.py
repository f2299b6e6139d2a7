"""The tail of a decoder layer in CUDA C++: one launch, of cuda/layer_tail.cu for few rows, and of
cuda/layer_tail_wgmma.cu for dozens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import Argument, compiled
from specengine.kernels.cuda.tensor_map import TensorMap, tensor_map
from specengine.kernels.dispatch import multiprocessors
from specengine.kernels.linear.types import (
    MOST_FEW_TAIL_ROWS,
    MOST_TAIL_ROWS,
    Projection,
    Tail,
    TailWeights,
)

_SOURCES = Path(__file__).parents[1] / "cuda"
# As in layer_tail.cu: warps that multiply, warps that fetch, tiles whose sums meet at a time.
_WORKERS = 8
_PRODUCERS = 2
_AT_ONCE = 7
_STAGE_BYTES = 16 * 2 * 64 * _WORKERS
STAGES = 7  # through which weights come
# As in layer_tail_wgmma.cu: threads, rows of weights whose squares are added up at a time, stages.
_WIDE_THREADS = 384
WIDE_STEP = 128  # sizes are multiples of it
_SLAB = 16
_WIDE_STAGE_BYTES = 64 * 256
_X_STAGES = 4
_WIDE_STAGES = {2: 12, 4: 10}  # by tiles of 8 rows: as many as there is room for


@dataclass(frozen=True)
class _Form:
    """A kernel and how it is launched."""

    name: str
    threads: int
    shared_bytes: int
    defines: tuple[tuple[str, int], ...]
    blocks: int


@cache
def _counters(device: torch.device) -> Tensor:
    """Where blocks meet: zeros before and after. Launches that may overlap must not share them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a layer's tail once before capturing it: it needs memory")
    return torch.zeros(8, dtype=torch.int32, device=device)


def _few(blocks: int) -> _Form:
    sums = 4 * _AT_ONCE * _WORKERS * 8 * 20
    shared = STAGES * (_STAGE_BYTES + 16) + sums + 4 * _WORKERS * 8
    threads, defines = 32 * (_WORKERS + _PRODUCERS), (("STAGES", STAGES),)
    return _Form("layer_tail", threads, shared, defines, blocks)


def _wide(rows: int, blocks: int) -> _Form:
    row_tiles = next(tiles for tiles in _WIDE_STAGES if rows <= 8 * tiles)
    stages = _WIDE_STAGES[row_tiles]
    rings = stages * _WIDE_STAGE_BYTES + _X_STAGES * 8 * row_tiles * 256
    shared = rings + 8192 * row_tiles + 8 * (2 * stages + 2 * _X_STAGES + 3) + 4 * 8 * row_tiles
    defines = ("MT", row_tiles), ("STAGES", stages), ("CLUSTER", 2)
    return _Form("layer_tail_wgmma", _WIDE_THREADS, shared, defines, blocks // 2 * 2)


def _slabs(weight: Tensor, gated: bool = False) -> TensorMap:
    """[outs / 16, 2, 8, depth], in boxes of two slabs and 64 columns: 16 rows a slab, or of gates 8
    gate rows and 8 up rows."""
    outs, depth = weight.shape
    apart = outs // 2 if gated else 8
    strides = depth, apart * depth, (8 if gated else _SLAB) * depth
    return tensor_map(weight, (depth, 8, 2, outs // _SLAB), strides, (64, 8, 2, 2))


def _rows(x: Tensor, padded: int) -> TensorMap:
    """[1, 1, rows, depth], in boxes of all rows and 64 columns. Rows behind the last are zeros."""
    (rows, depth), stride = x.shape, x.stride(0)
    return tensor_map(
        x, (depth, rows, 1, 1), (stride, rows * stride, rows * stride), (64, padded, 1, 1)
    )


def layer_tail(
    heads: Tensor,
    stream: Tensor,
    weights: TailWeights,
    eps: float,
    following: Projection | None,
) -> Tail:
    rows, device = len(stream), stream.device
    if rows > MOST_TAIL_ROWS:
        raise ValueError(f"{rows} rows are too many: the kernel takes {MOST_TAIL_ROWS}")
    hidden, heads_size, intermediate = weights.sizes
    is_wide = rows > MOST_FEW_TAIL_ROWS
    if is_wide and any(size % WIDE_STEP for size in weights.sizes):
        raise ValueError(
            f"{weights.sizes}: of {rows} rows the kernel takes multiples of {WIDE_STEP}"
        )
    blocks = multiprocessors(device)
    form = _wide(rows, blocks) if is_wide else _few(blocks)
    bias = None if following is None else following.bias
    defines = (
        ("TYPE", 0 if stream.dtype == torch.bfloat16 else 1),
        *form.defines,
        ("HAS_QKV", int(following is not None)),
        ("HAS_BIAS", int(bias is not None)),
    )
    source = _SOURCES / f"{form.name}.cu"
    kernel = compiled(source, form.name, defines, form.shared_bytes, device.index or 0)
    middle, end = stream.new_empty((rows, hidden)), stream.new_empty((rows, hidden))
    gates = stream.new_empty((rows, intermediate))
    qkv_size = 0 if following is None else len(following.weight)
    qkv = None if following is None else stream.new_empty((rows, qkv_size))
    out, gate_up, down = weights.out, weights.gate_up, weights.down
    after = None if following is None else following.weight
    given: tuple[Argument, ...] = heads, out, gate_up, down, after
    between: tuple[Argument, ...] = ()
    strides: tuple[int, ...] = heads.stride(0), stream.stride(0)
    if is_wide:
        strides = strides[1:]
        padded = 8 * dict(form.defines)["MT"]
        maps = _rows(heads, padded), _slabs(out), _slabs(gate_up, gated=True), _slabs(down)
        given = *maps, maps[1] if after is None else _slabs(after)
        scaled = stream.new_empty((rows, hidden))
        squares = stream.new_empty((hidden // _SLAB, padded), dtype=torch.float32)
        between = scaled, squares, _rows(scaled, padded), _rows(gates, padded)
    kernel.launch(
        (form.blocks, 1, 1),
        form.threads,
        form.shared_bytes,
        (
            given[0],
            stream,
            given[1],
            weights.gain,
            *given[2:4],
            None if following is None else following.gain,
            given[4],
            bias,
            middle,
            gates,
            end,
            qkv,
            *between,
            _counters(device),
            rows,
            heads_size,
            hidden,
            intermediate,
            qkv_size,
            *strides,
            eps,
        ),
    )
    return Tail(end, qkv)
