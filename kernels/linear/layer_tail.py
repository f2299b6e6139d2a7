"""What a wide decoder layer does for up to 32 rows after its attention, as one operation.

A wide model's round is a stream of weights. In a kernel of its own each product ends with memory
idle: sums meet, the next kernel starts, fetches its rows, asks for its first weights. Here the
output projection, the feed-forward and the next layer's first projection share one stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.dispatch import (
    Backend,
    has_dependent_launch,
    has_much_shared,
    has_warpgroups,
    has_whole_device,
    multiprocessors,
)
from specengine.kernels.linear import layer_tail_ref
from specengine.kernels.linear.types import (
    MOST_FEW_TAIL_ROWS,
    MOST_TAIL_ROWS,
    Projection,
    Tail,
    TailWeights,
)

MIN_HIDDEN = 2048  # below, kernels of few_row end too soon for their stream to matter
TILE = 32  # Q is a multiple of it
_STEP, _WIDE_STEP = 32, 128  # H, A and I are multiples of it: of up to 8 rows, and of more


def fits(stream: Tensor, weights: TailWeights) -> bool:
    """Whether the kernel is the faster choice, and can take these."""
    rows, hidden = stream.shape
    is_few = rows <= MOST_FEW_TAIL_ROWS
    step = _STEP if is_few else _WIDE_STEP
    is_half = stream.dtype in (torch.bfloat16, torch.float16) and weights.out.dtype == stream.dtype
    return (
        0 < rows <= MOST_TAIL_ROWS
        and hidden > MIN_HIDDEN
        and is_half
        and all(size % step == 0 for size in weights.sizes)
        and (has_dependent_launch(stream) if is_few else has_warpgroups(stream))
        and has_much_shared(stream)
        and multiprocessors(stream.device) > 1
        and has_whole_device()
        and program.available()
    )


def layer_tail(
    heads: Tensor,
    stream: Tensor,
    weights: TailWeights,
    eps: float,
    following: Projection | None = None,
    *,
    backend: Backend = "auto",
) -> Tail:
    """heads: [T, A], stream: [T, H], neither modified.

    middle = stream + heads out^T; next = middle + (silu(g) * u) down^T with g, u = norm(middle)
    gate_up^T; qkv = norm(next) weight^T + bias. Products are summed in float32 and rounded to
    stream's dtype where the single operations round them. "cuda" takes half precision, T up to
    MOST_TAIL_ROWS, H, A and I that are multiples of 32 (of 128 beyond MOST_FEW_TAIL_ROWS) and Q of
    32. It gives a row the same result whatever other rows there are, but for the sums' order, which
    is one up to MOST_FEW_TAIL_ROWS and another beyond.
    """
    if backend == "cuda" or (backend == "auto" and fits(stream, weights)):
        from specengine.kernels.linear import layer_tail_cuda

        return layer_tail_cuda.layer_tail(heads, stream, weights, eps, following)
    return layer_tail_ref.layer_tail(heads, stream, weights, eps, following)
