"""What the rules that weigh the target against the draft have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.kernels.sample_rows_ref import invert_cdf
from specengine.target.verify.coins import Coins, KeyedCoins
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.walk import Walk, path_to


@dataclass(frozen=True)
class Verdict:
    """Where the accepted path of each request ends, and what its next token is drawn from."""

    ends_B: Tensor  # int64, nodes
    residual_BV: Tensor  # float64, up to a factor; not read where the end has no children


class SampledVerifier(MatchVerifier):
    """Draws are keyed by output position: coins from Stream.ACCEPT, the token in place of a
    rejected one from Stream.RESIDUAL. After a node that nobody drafted below, the token is the one
    that plain decoding samples (Stream.SAMPLE).

    Rounds without sampled drafts or without sampling requests are matched: no rule accepts more.
    """

    needs_draft_probs = True
    follows_drafts = True
    coins = KeyedCoins

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        without_probs = self.needs_draft_probs and proposal.draft_probs is None
        if proposal.is_empty or sampling.all_greedy or without_probs:
            return super().walks(output, sampling, proposal)
        probs = RoundProbs.of(output.logits, sampling, proposal)
        verdict = self.judge(probs, self.coins.draw(sampling, probs.depths_BN))
        uniforms_B = self.next_uniforms(probs, verdict.ends_B, sampling)
        tokens_B = invert_cdf(next_weights(probs, verdict), uniforms_B)
        return _to_host(probs, verdict.ends_B, tokens_B)

    @abstractmethod
    def judge(self, probs: RoundProbs, coins: Coins) -> Verdict:
        """The rule."""

    def next_uniforms(self, probs: RoundProbs, ends_B: Tensor, sampling: SamplingBatch) -> Tensor:
        """float64 [B], for the token after each path."""
        assert sampling.random is not None
        assert sampling.output_pos is not None
        seeds_B = sampling.random.seeds
        position_B = sampling.output_pos + probs.depths_BN.gather(1, ends_B[:, None]).squeeze(1)
        return torch.where(
            probs.children(ends_B).any(-1),
            draw(seeds_B, position_B, Stream.RESIDUAL),
            draw(seeds_B, position_B, Stream.SAMPLE),
        )


def next_weights(probs: RoundProbs, verdict: Verdict) -> Tensor:
    """float64 [B, V], what the token after each path is drawn from: the residual, scaled to a sum
    of 1, or the target where nothing was drafted. A residual of nothing, which only rounding can
    reach, stands for the target too."""
    total_B1 = verdict.residual_BV.sum(-1, keepdim=True)
    rejected_B1 = probs.children(verdict.ends_B).any(-1, keepdim=True)
    residual = verdict.residual_BV / total_B1
    return torch.where(rejected_B1 & (total_B1 > 0), residual, probs.weights(verdict.ends_B))


def _to_host(probs: RoundProbs, ends_B: Tensor, tokens_B: Tensor) -> list[Walk]:
    """In one copy."""
    columns = [ends_B[:, None], tokens_B[:, None], probs.tokens_BN, probs.parents_BN]
    walks, width = [], probs.tokens_BN.shape[1]
    for end, last, *nodes in torch.cat(columns, dim=1).tolist():
        path = path_to(end, parents=nodes[width:])
        walks.append(Walk(path, [*(nodes[node] for node in path[1:]), last]))
    return walks
