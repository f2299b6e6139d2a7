"""The tail of a decoder layer in CUDA C++ (cuda/layer_tail.cu): one launch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import multiprocessors
from specengine.kernels.linear.types import MOST_TAIL_ROWS, Projection, Tail, TailWeights

_SOURCE = Path(__file__).parents[1] / "cuda" / "layer_tail.cu"
# As in the source: warps that multiply, warps that fetch, tiles whose sums meet at a time.
_WORKERS = 8
_PRODUCERS = 2
_AT_ONCE = 7
_STAGE_BYTES = 16 * 2 * 64 * _WORKERS
STAGES = 7  # through which weights come


@cache
def _counters(device: torch.device) -> Tensor:
    """Where blocks meet: zeros before and after. Launches that may overlap must not share them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a layer's tail once before capturing it: it needs memory")
    return torch.zeros(8, dtype=torch.int32, device=device)


def _row_tiles(rows: int) -> int:
    return 1 if rows <= 8 else 2


def _shared_bytes(row_tiles: int) -> int:
    rows = 8 * row_tiles
    sums = 4 * _AT_ONCE * _WORKERS * rows * 20
    return STAGES * (_STAGE_BYTES + 16) + sums + 4 * _WORKERS * rows


def layer_tail(
    heads: Tensor, stream: Tensor, weights: TailWeights, eps: float, following: Projection | None
) -> Tail:
    rows = len(stream)
    if rows > MOST_TAIL_ROWS:
        raise ValueError(f"{rows} rows are too many: the kernel takes {MOST_TAIL_ROWS}")
    hidden, heads_size, intermediate = weights.sizes
    row_tiles = _row_tiles(rows)
    shared = _shared_bytes(row_tiles)
    bias = None if following is None else following.bias
    defines = (
        ("TYPE", 0 if stream.dtype == torch.bfloat16 else 1),
        ("NT", row_tiles),
        ("STAGES", STAGES),
        ("HAS_QKV", int(following is not None)),
        ("HAS_BIAS", int(bias is not None)),
    )
    kernel = compiled(_SOURCE, "layer_tail", defines, shared, stream.device.index or 0)
    middle, end = stream.new_empty((rows, hidden)), stream.new_empty((rows, hidden))
    gates = stream.new_empty((rows, intermediate))
    qkv_size = 0 if following is None else len(following.weight)
    qkv = None if following is None else stream.new_empty((rows, qkv_size))
    kernel.launch(
        (multiprocessors(stream.device), 1, 1),
        32 * (_WORKERS + _PRODUCERS),
        shared,
        (
            heads,
            stream,
            weights.out,
            weights.gain,
            weights.gate_up,
            weights.down,
            None if following is None else following.gain,
            None if following is None else following.weight,
            bias,
            middle,
            gates,
            end,
            qkv,
            _counters(stream.device),
            rows,
            heads_size,
            hidden,
            intermediate,
            qkv_size,
            heads.stride(0),
            stream.stride(0),
            eps,
        ),
    )
    return Tail(end, qkv)
