"""The token of the largest logit of each row: the head's product, the norm before it and the choice
behind it in one kernel, which writes no logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend, multiprocessors
from specengine.kernels.head import head_best_ref, head_stream


def slots_for(device: torch.device) -> Tensor:
    """int64 zeros, where blocks leave what they have found: zeros before and after a call. Calls
    that share them must not overlap: one would wait for what the other has taken."""
    size = head_stream.MAX_ROWS * multiprocessors(device)
    return torch.zeros(size, dtype=torch.int64, device=device)


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
    device; "cuda" takes on Hopper what `head_stream.can_take` says, and gives a row the same result
    whatever other rows there are. It reads weight and norm_weight before the kernel ahead has
    ended, which must write neither.
    """
    if backend == "cuda" or (backend == "auto" and head_stream.fits(x, weight)):
        from specengine.kernels.head import head_best_cuda

        return head_best_cuda.head_best(x, weight, slots, norm_weight, eps, ids)
    return head_best_ref.head_best(x, weight, norm_weight, eps, ids)
