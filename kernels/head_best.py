"""The token of the largest logit of each row: the head's product, the norm before it and the choice
behind it in one kernel, which writes no logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels import head_best_ref
from specengine.kernels.cuda import program
from specengine.kernels.dispatch import (
    Backend,
    has_dependent_launch,
    has_much_shared,
    multiprocessors,
)

MAX_ROWS = 16  # beyond, a draft's head gains nothing (benchmarks/results, head-best)


def slots_for(device: torch.device) -> Tensor:
    """int64 zeros, where blocks leave what they have found: zeros before and after a call. Calls
    that share them must not overlap: one would wait for what the other has taken."""
    return torch.zeros(MAX_ROWS * multiprocessors(device), dtype=torch.int64, device=device)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is there and the faster choice."""
    return (
        has_dependent_launch(x)
        and has_much_shared(x)
        and can_take(x, weight)
        and program.available()
    )


def can_take(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes x [R, H] and weight [V, H]: half precision, rows of 64 bytes and
    multiples, few and not too wide."""
    from specengine.kernels import head_best_cuda

    rows, hidden = x.shape
    is_half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    is_aligned = all(t.stride(1) == 1 and t.data_ptr() % 16 == 0 for t in (x, weight))
    return (
        is_half
        and is_aligned
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and 0 < rows <= MAX_ROWS
        and hidden == weight.shape[1]
        and head_best_cuda.takes_depth(hidden)
    )


def head_best(
    x: Tensor,
    weight: Tensor,
    slots: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    ids: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """``linear(rms_norm(x, norm_weight, eps), weight).argmax(-1)``, the first among equals; ids of
    that, where given. Logits are rounded to x's dtype before they are compared.

    x: [R, H], before the norm, where that is given; weight: [V, H]; slots: of `slots_for`;
    norm_weight: [H] of x's dtype, contiguous; ids: int64 [V], contiguous -> int64 [R]. No NaN. Any
    device; "cuda" takes on Hopper what `can_take` says, and gives a row the same result whatever
    stands beside it. It reads weight and norm_weight before the kernel ahead has ended, which must
    write neither.
    """
    if backend == "cuda" or (backend == "auto" and fits(x, weight)):
        from specengine.kernels import head_best_cuda

        return head_best_cuda.head_best(x, weight, slots, norm_weight, eps, ids)
    return head_best_ref.head_best(x, weight, norm_weight, eps, ids)
