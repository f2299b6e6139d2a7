"""What the rules that weigh the target against the draft have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.kernels.accept.accept_sampled_ref import (
    Verdict,
    coin_uniforms,
    followed,
    next_uniforms,
)
from specengine.kernels.accept.types import Accepted, Draws, SampledRound
from specengine.kernels.dispatch import Backend
from specengine.layers.sampler import Sample
from specengine.target.verify.coins import Coins, KeyedCoins
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.walk import Walk, to_host


class SampledVerifier(MatchVerifier):
    """Draws are keyed by output position: coins from Stream.ACCEPT, the token in place of a
    rejected one from Stream.RESIDUAL. After a node without drafts below it, the token is the one
    that plain decoding samples (Stream.SAMPLE).

    Rounds without sampled drafts or without sampling requests are matched: no rule accepts more.
    """

    needs_draft_probs = True
    text_depends_on_drafts = True
    device_rule = "stochastic"
    keeps_logits = False
    coins = KeyedCoins
    # (probs, draws, backend=): the whole rule at once, by the same numbers as judge, coins and
    # next_uniforms, none of which it calls.
    kernel: ClassVar[Callable[..., Accepted] | None] = None

    def __init_subclass__(cls) -> None:
        """A kernel belongs to the rule that it was declared with."""
        super().__init_subclass__()
        if "judge" in vars(cls) and "kernel" not in vars(cls):
            cls.kernel = None

    def __init__(self, sampler: Sample | None = None, backend: Backend = "auto") -> None:
        super().__init__(sampler)
        self.backend = backend

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        without_probs = self.needs_draft_probs and proposal.draft_probs is None
        if proposal.is_empty or sampling.all_greedy or without_probs:
            return super().walks(output, sampling, proposal)
        probs = RoundProbs.of(output.logits, sampling, proposal)
        return to_host(self.decide_on_host(probs, sampling), probs.tokens_BN, probs.parents_BN)

    def decide_on_host(self, probs: RoundProbs, sampling: SamplingBatch) -> Accepted:
        """The accepted path and the token after it, in a round on the host."""
        if self.kernel is not None and self.has_keyed_numbers():
            return self.kernel(probs, draws_of(sampling), backend=self.backend)
        verdict = self.judge(probs, self.coins.draw(sampling, probs.depths_BN))
        uniforms_B = self.next_uniforms(probs, verdict.ends_B, sampling)
        return followed(probs, verdict, uniforms_B)

    def decide(self, drafts: SampledRound, draws: Draws) -> Accepted:
        """The accepted path and the token after it, in a round on the device. May be captured in
        a CUDA graph: `judge` must not wait for the device there, nor branch on values that lie on
        it."""
        if self.kernel is not None:
            return self.kernel(drafts, draws, backend=self.backend)
        verdict = self.judge(drafts, KeyedCoins(coin_uniforms(drafts, draws)))
        return followed(drafts, verdict, next_uniforms(drafts, verdict.ends_B, draws))

    def has_keyed_numbers(self) -> bool:
        """Whether no others were put in their place, as proofs do."""
        replaced = type(self).next_uniforms is not SampledVerifier.next_uniforms
        return self.coins is KeyedCoins and not replaced

    @abstractmethod
    def judge(self, probs: SampledRound, coins: Coins) -> Verdict:
        """The rule."""

    def next_uniforms(self, probs: RoundProbs, ends_B: Tensor, sampling: SamplingBatch) -> Tensor:
        """float64 [B], for the token after each path."""
        return next_uniforms(probs, ends_B, draws_of(sampling))


def draws_of(sampling: SamplingBatch) -> Draws:
    assert sampling.random is not None
    assert sampling.output_pos is not None
    return keyed_draws(sampling.random.seeds, sampling.output_pos)


def keyed_draws(seeds_B: Tensor, positions_B: Tensor) -> Draws:
    """positions_B: int64, of the next output token."""
    return Draws(
        seeds_B,
        positions_B,
        accept=int(Stream.ACCEPT),
        residual=int(Stream.RESIDUAL),
        sample=int(Stream.SAMPLE),
    )
