"""What the rules for sampled drafts have in common, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.sample.keyed_uniform import LANE, keyed_uniform
from specengine.kernels.sample.sample_rows_ref import invert_cdf

# chances [B, M, K], nodes [B, M] -> int64 [B, M]: which of K events that exclude each other happens
# to the coin of each node, K where none does. Proofs put scripts in place of coins.
Pick = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """Where the accepted path of each request ends, and what its next token is drawn from."""

    ends_B: Tensor  # int64, nodes
    residual_BV: Tensor  # float64, up to a factor; not read where the end has no children


Judge = Callable[[SampledRound, Pick], Verdict]


def accept(drafts: SampledRound, draws: Draws, judge: Judge) -> Accepted:
    """The round of one rule."""
    verdict = judge(drafts, pick_by(coin_uniforms(drafts, draws)))
    return followed(drafts, verdict, next_uniforms(drafts, verdict.ends_B, draws))


def followed(drafts: SampledRound, verdict: Verdict, uniforms_B: Tensor) -> Accepted:
    """By the token that a uniform of each request draws."""
    return Accepted(verdict.ends_B, invert_cdf(next_weights(drafts, verdict), uniforms_B))


def pick_by(uniforms_BN: Tensor) -> Pick:
    """By uniforms in [0, 1), float64: an event of chance 0 never happens."""

    def pick(chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        uniforms_BM = uniforms_BN.gather(1, nodes_BM)
        return (uniforms_BM[:, :, None] >= chances_BMK.cumsum(-1)).sum(-1)

    return pick


def stands(pick: Pick, chances_BM: Tensor, nodes_BM: Tensor) -> Tensor:
    """bool [B, M]: whether each node's token is accepted, with its own chance."""
    return pick(chances_BM[:, :, None], nodes_BM) == 0


def coin_uniforms(drafts: SampledRound, draws: Draws) -> Tensor:
    """float64 [B, N]."""
    depths_BN = drafts.depths_BN
    numbers_BN = drafts.nodes() if drafts.numbers_BN is None else drafts.numbers_BN
    keys_BN = draws.positions_B[:, None] + depths_BN - 1 + numbers_BN * LANE
    seeds_BN = draws.seeds_B[:, None].expand_as(keys_BN)
    flat = keyed_uniform(seeds_BN.reshape(-1), keys_BN.reshape(-1), draws.accept)
    return flat.view(depths_BN.shape)


def next_uniforms(drafts: SampledRound, ends_B: Tensor, draws: Draws) -> Tensor:
    """float64 [B], for the token after each path."""
    position_B = draws.positions_B + drafts.depths_BN.gather(1, ends_B[:, None]).squeeze(1)
    return torch.where(
        drafts.children(ends_B).any(-1),
        keyed_uniform(draws.seeds_B, position_B, draws.residual),
        keyed_uniform(draws.seeds_B, position_B, draws.sample),
    )


def next_weights(drafts: SampledRound, verdict: Verdict) -> Tensor:
    """float64 [B, V], what the token after each path is drawn from: the residual, scaled to a sum
    of 1, or the target where nothing was drafted. A residual of nothing, which only rounding can
    give, means the target too."""
    total_B1 = verdict.residual_BV.sum(-1, keepdim=True)
    rejected_B1 = drafts.children(verdict.ends_B).any(-1, keepdim=True)
    residual = verdict.residual_BV / total_B1
    return torch.where(rejected_B1 & (total_B1 > 0), residual, drafts.weights(verdict.ends_B))
