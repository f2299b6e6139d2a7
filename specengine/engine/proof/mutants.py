"""Rules that are wrong on purpose: a check that lets its mutants pass proves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.accept.accept_sampled_ref import Verdict
from specengine.kernels.accept.types import SampledRound
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.coins import Coins, KeyedCoins
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier


def decides_by_judge(verifier: TreeVerifier) -> TypeGuard[SampledVerifier]:
    """Whether what `judge` decides is what the rule does: nothing that calls it is overridden."""
    if not isinstance(verifier, SampledVerifier):
        return False
    callers = ("accept", "walks", "decide_on_host")
    return all(getattr(type(verifier), one) is getattr(SampledVerifier, one) for one in callers)


class Mutant(SampledVerifier):
    """The rule of another verifier that decides by judge, with one thing wrong."""

    name = ""
    caught_by = ""
    weighs_draft = False  # means nothing to a rule that does not hold target against draft

    def __init__(self, rule: SampledVerifier) -> None:
        super().__init__()
        self.rule = rule
        self.needs_draft_probs = rule.needs_draft_probs

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        return self.rule.judge(probs, coins)


class WrongResidual(Mutant):
    """Draws from the whole target in place of a rejected token."""

    name = "wrong residual"
    caught_by = "enumeration"

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        verdict = self.rule.judge(probs, coins)
        return replace(verdict, residual_BV=probs.target(verdict.ends_B))


class RenormalisedDraft(Mutant):
    """Weighs the two best tokens of the draft alone, scaled up; it was drawn from all of them."""

    name = "renormalised draft"
    caught_by = "enumeration"
    weighs_draft = True

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        assert probs.draft_BNV is not None
        second_BN1 = probs.draft_BNV.topk(2).values[..., 1:]
        best_BNV = probs.draft_BNV.masked_fill(probs.draft_BNV < second_BN1, 0.0)
        return self.rule.judge(replace(probs, draft_BNV=best_BNV), coins)


class OffByOnePosition(Mutant):
    """Reads the target one row below the row that decides."""

    name = "off-by-one position"
    caught_by = "enumeration"

    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        target_TV, sum_T = (x.roll(-1, 0) for x in (probs.target_TV, probs.target_sum_T))
        return self.rule.judge(replace(probs, target_TV=target_TV, target_sum_T=sum_T), coins)


class _LooseCoins(KeyedCoins):
    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        uniforms_BM = self.uniforms_BN.gather(1, nodes_BM)
        return (uniforms_BM[:, :, None] > chances_BMK.cumsum(-1)).sum(-1)


class NonStrictAccept(Mutant):
    """Accepts where a uniform equals the chance, so that 0 accepts what can never be said."""

    name = "non-strict accept"
    caught_by = "uniforms of 0"
    weighs_draft = True
    coins = _LooseCoins


class _DraftersCoins(KeyedCoins):
    stream = Stream.DRAFT


class SharedAcceptStream(Mutant):
    """Verifies a drafted token with the number that drew it."""

    name = "random stream shared by draft and accept"
    caught_by = "χ² of rounds"
    weighs_draft = True
    coins = _DraftersCoins


class SharedResidualStream(Mutant):
    """Replaces a rejected token with the number that drew it."""

    name = "random stream shared by draft and residual"
    caught_by = "χ² of rounds"

    def next_uniforms(self, probs: RoundProbs, ends_B: Tensor, sampling: SamplingBatch) -> Tensor:
        assert sampling.random is not None
        assert sampling.output_pos is not None
        children_BN = probs.children(ends_B)
        position_B = sampling.output_pos + probs.depths_BN.gather(1, ends_B[:, None]).squeeze(1)
        shared_B = draw(
            sampling.random.seeds, position_B, Stream.DRAFT, lane=children_BN.long().argmax(-1)
        )
        own_B = super().next_uniforms(probs, ends_B, sampling)
        return torch.where(children_BN.any(-1), shared_B, own_B)


MUTANTS: tuple[type[Mutant], ...] = (
    WrongResidual,
    RenormalisedDraft,
    OffByOnePosition,
    NonStrictAccept,
    SharedAcceptStream,
    SharedResidualStream,
)
