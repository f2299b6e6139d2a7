"""The best tokens of each row and what its log-sum-exp is made of: the head's product, the norm
before it and the search behind it in one kernel, which writes no logits."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.head import head_stream, head_topk_ref
from specengine.kernels.head.types import BlockPartials


def fits(x: Tensor, weight: Tensor, topk: int) -> bool:
    """Whether the kernel is there and the faster choice."""
    return head_stream.fits(x, weight) and _has_room(x, weight, topk)


def can_take(x: Tensor, weight: Tensor, topk: int) -> bool:
    """Whether the kernel takes x [R, H] and weight [V, H]: what `head_stream.can_take` says, few
    of the best, and logits that blocks have room for."""
    return head_stream.can_take(x, weight) and _has_room(x, weight, topk)


def _has_room(x: Tensor, weight: Tensor, topk: int) -> bool:
    from specengine.kernels.head import head_topk_cuda

    return 0 < topk <= head_topk_cuda.MAX_TOPK and head_topk_cuda.has_room(x, weight)


def head_topk(
    x: Tensor,
    weight: Tensor,
    topk: int,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    backend: Backend = "auto",
) -> BlockPartials:
    """`BlockPartials` of ``linear(rms_norm(x, norm_weight, eps), weight)``, rounded to x's dtype.

    x: [R, H], before the norm, where that is given; weight: [V, H]; norm_weight: [H] of x's dtype,
    contiguous. No logit is NaN or infinite, but minus infinity. Any device; "cuda" takes on Hopper
    what `can_take` says, and gives a row the same result whatever other rows there are. It reads
    weight and norm_weight before the kernel ahead has ended, which must write neither.
    """
    if backend == "cuda" or (backend == "auto" and fits(x, weight, topk)):
        from specengine.kernels.head import head_topk_cuda

        return head_topk_cuda.head_topk(x, weight, topk, norm_weight, eps)
    return head_topk_ref.head_topk(x, weight, topk, norm_weight, eps)
