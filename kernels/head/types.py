"""What the head's kernels leave, and where their blocks meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Meeting:
    """Where the programs of a row meet; calls that share it must not overlap."""

    keys: Tensor  # int64 [R], zeros before and after
    counters: Tensor  # int32 [R], the same

    @classmethod
    def of(cls, num_rows: int, device: torch.device) -> Meeting:
        keys = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(keys, torch.zeros(num_rows, dtype=torch.int32, device=device))
