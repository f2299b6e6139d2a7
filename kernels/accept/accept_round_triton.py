"""A round of drafts on its way through its launches: what they share, and how they are called."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from specengine.kernels.accept.types import Draws, SampledRound
from specengine.kernels.sample.keyed_uniform_ref import GOLDEN

_MAX_BLOCK = 4096  # of the vocabulary, a program


def offset_of(stream: int) -> int:
    """What keyed_uniform adds to a seed."""
    return GOLDEN * (stream + 1) % 2**64


@dataclass(frozen=True)
class Round:
    """A round on its way through the launches; tensors contiguous but for the draft's rows."""

    drafts: SampledRound
    draws: Draws
    greedy_B: Tensor  # uint8
    partials_BNS: Tensor  # float64, sums over a share of the vocabulary
    lefts_BN: Tensor  # float64, mass of the draft's rows without earlier siblings' tokens
    chances_BN: Tensor  # float64, as chain_chances gives them; unset of trees
    missing_BN: Tensor  # float64, mass of the residual once a node is rejected
    firsts_BN: Tensor  # int64, the first child, 0 where there is none
    nexts_BN: Tensor  # int64, the next sibling, 0 where there is none
    ends_B: Tensor  # int64, where paths end
    scales_B: Tensor  # float64, what the target is multiplied by there
    counters_B: Tensor  # int32, zeros between launches
    block: int

    @classmethod
    def of(cls, drafts: SampledRound, draws: Draws) -> Round:
        drafts = replace(drafts, **{name: _laid_out(x) for name, x in vars(drafts).items()})
        draws = replace(draws, **{name: _laid_out(x) for name, x in vars(draws).items()})
        (batch, nodes), vocab = drafts.tokens_BN.shape, drafts.target_TV.shape[1]
        block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
        sums_BN = drafts.target_sum_T.new_empty(3, batch, nodes)
        links_BN = drafts.tokens_BN.new_empty(2, batch, nodes)
        return cls(
            drafts,
            draws,
            drafts.greedy_B.view(torch.uint8),
            drafts.target_sum_T.new_empty(batch, nodes, triton.cdiv(vocab, block)),
            sums_BN[0],
            sums_BN[1],
            sums_BN[2],
            links_BN[0],
            links_BN[1],
            torch.empty_like(drafts.roots_B),
            drafts.target_sum_T.new_ones(batch),
            torch.zeros(batch, dtype=torch.int32, device=drafts.roots_B.device),
            block,
        )

    @property
    def splits(self) -> int:
        return self.partials_BNS.shape[2]

    @property
    def draft_BNV(self) -> Tensor:
        """Where drafts have none, rows that are not read."""
        draft_BNV = self.drafts.draft_BNV
        return self.drafts.target_TV[:, None] if draft_BNV is None else draft_BNV

    @property
    def numbers_BN(self) -> Tensor:
        """Where places are the numbers, what is not read."""
        numbers_BN = self.drafts.numbers_BN
        return self.drafts.tokens_BN if numbers_BN is None else numbers_BN

    def blocks(self) -> dict[str, int]:
        return {
            "BLOCK": self.block,
            "BLOCK_N": triton.next_power_of_2(self.lefts_BN.shape[1]),
            "BLOCK_S": triton.next_power_of_2(self.splits),
            "num_warps": max(1, min(8, self.block // 256)),
        }

    def read(self) -> tuple[Tensor, ...]:
        """What kernels read, in the order of their first arguments."""
        drafts, draws = self.drafts, self.draws
        return (
            drafts.target_TV,
            drafts.target_sum_T,
            self.draft_BNV,
            drafts.tokens_BN,
            drafts.depths_BN,
            drafts.roots_B,
            self.greedy_B,
            draws.seeds_B,
            draws.positions_B,
            self.lefts_BN,
        )

    def sizes(self) -> tuple[int, ...]:
        """The vocabulary, the nodes of a request; strides of the target's rows, the draft's
        requests and its nodes."""
        target_TV, (_, nodes) = self.drafts.target_TV, self.drafts.tokens_BN.shape
        return target_TV.shape[1], nodes, target_TV.stride(0), *self.draft_BNV.stride()[:2]

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *between: Tensor, **constants: Any
    ) -> None:
        """A kernel whose arguments are `read()`, what is between, and `sizes()`."""
        # A product taken from in one rounding would not be what the reference gives.
        kernel[grid](*self.read(), *between, *self.sizes(), **constants, enable_fp_fusion=False)


def _laid_out(value: Any) -> Any:
    """Contiguous; the draft's rows may lie apart."""
    if not isinstance(value, Tensor) or (value.dim() == 3 and value.stride(2) == 1):
        return value
    return value.contiguous()
