"""The best tokens of each row and what its log-sum-exp is made of: the head's product, the norm
before it and the search behind it in one kernel, which writes no logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels import head_stream, head_topk_ref
from specengine.kernels.dispatch import Backend

_LAST = 2**31 - 1


@dataclass(frozen=True)
class BlockPartials:
    """R rows of logits, each reduced by block of columns. Column c belongs to block
    c // width % S.

    keys_RSK: int64, the K best of a block, falling: ``ordered(logit) << 31 | 2^31 - 1 - column``,
    where `ordered` maps float32 to 32 bits that order as it does, -0 like 0; 0 where a block has
    seen fewer. sums_RS2: float32, the largest logit x of a block and the sum of exp(logit - x);
    minus infinity and 0 of a block that has seen nothing but minus infinity.
    """

    keys_RSK: Tensor
    sums_RS2: Tensor
    width: int

    @property
    def topk(self) -> int:
        return self.keys_RSK.shape[2]

    def best(self) -> tuple[Tensor, Tensor]:
        """The K best columns of each row, the first among equals, and their logits: int64 and
        float32, [R, K]."""
        keys_RK = self.keys_RSK.flatten(1).sort(descending=True).values[:, : self.topk]
        ordered = keys_RK >> 31
        bits = torch.where(ordered >= 2**31, ordered - 2**31, -1 - ordered)
        return _LAST - (keys_RK & _LAST), bits.to(torch.int32).view(torch.float32)

    def log_sums(self) -> Tensor:
        """log(sum(exp(logit))) of each row, float32 [R]."""
        largest_RS, sums_RS = self.sums_RS2.unbind(-1)
        return (largest_RS + sums_RS.log()).logsumexp(-1)


def fits(x: Tensor, weight: Tensor, topk: int) -> bool:
    """Whether the kernel is there and the faster choice."""
    return head_stream.fits(x, weight) and _has_room(x, weight, topk)


def can_take(x: Tensor, weight: Tensor, topk: int) -> bool:
    """Whether the kernel takes x [R, H] and weight [V, H]: what `head_stream.can_take` says, few
    of the best, and logits that blocks have room for."""
    return head_stream.can_take(x, weight) and _has_room(x, weight, topk)


def _has_room(x: Tensor, weight: Tensor, topk: int) -> bool:
    from specengine.kernels import head_topk_cuda

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
    what `can_take` says, and gives a row the same result whatever stands beside it. It reads weight
    and norm_weight before the kernel ahead has ended, which must write neither.
    """
    if backend == "cuda" or (backend == "auto" and fits(x, weight, topk)):
        from specengine.kernels import head_topk_cuda

        return head_topk_cuda.head_topk(x, weight, topk, norm_weight, eps)
    return head_topk_ref.head_topk(x, weight, topk, norm_weight, eps)
