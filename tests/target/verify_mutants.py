"""Verification rules that are wrong on purpose: tests that let one of them pass prove nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.layers.logits import RowMap
from specengine.layers.sampler import Sampler
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.tree import flat_nodes


class OneUniformARound(Sampler):
    """Every depth draws at the position of the root."""

    def _positions(self, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        return super()._positions(sampling, replace(rows, depth_R=None))


class PositionOffByOne(Sampler):
    """A verified row draws at the position of the row below it."""

    def _positions(self, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        if rows.depth_R is not None:
            rows = replace(rows, depth_R=rows.depth_R + 1)
        return super()._positions(sampling, rows)


class PenaltiesOfTheRoot(Sampler):
    """Penalties do not count the tokens accepted within the round."""

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap | None = None
    ) -> Tensor:
        rows = rows or RowMap()
        return super().__call__(output, sampling, replace(rows, path=None))


class _Overruling(Sampler):
    """Lets a rule put the drafted next token of a chain in place of the sampled one."""

    drafted: Tensor  # int64 [T], -1 where no node follows

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap | None = None
    ) -> Tensor:
        rows = rows or RowMap()
        sampled = super().__call__(output, sampling, rows)
        drafted = self.drafted.clamp(min=0)
        probs = output.logits.softmax(-1).gather(1, drafted[:, None]).squeeze(1)
        overruled = self.overrules(probs, sampling, rows) & (self.drafted >= 0)
        return torch.where(overruled, drafted, sampled)

    def overrules(self, probs: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        raise NotImplementedError


class _Likely(_Overruling):
    def overrules(self, probs: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        return probs > 0.1


class _CoinFirst(_Overruling):
    def overrules(self, probs: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        assert sampling.random is not None
        seeds = rows.per_row(sampling.random.seeds)
        return draw(seeds, rows.output_pos(sampling), Stream.ACCEPT) < probs


class _OverrulingVerifier(MatchVerifier):
    def __init__(self, sampler: _Overruling) -> None:
        super().__init__(sampler)
        self.overruling = sampler

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        following = torch.full_like(proposal.tokens, -1)
        following[:, :-1] = proposal.tokens[:, 1:]
        for row, count in zip(following, proposal.num_nodes, strict=True):
            row[count - 1 :] = -1
        nodes = flat_nodes(proposal.num_nodes, following.shape[1])
        self.overruling.drafted = following.view(-1)[nodes].to(output.logits.device)
        return super().accept(output, batch, proposal)


def mutants() -> dict[str, MatchVerifier]:
    return {
        "accepts any draft with target probability above 0.1": _OverrulingVerifier(_Likely()),
        "tosses a coin, then samples from the target, not the residual": _OverrulingVerifier(
            _CoinFirst()
        ),
        "one uniform for all positions of a round": MatchVerifier(OneUniformARound()),
        "uniforms off by one position": MatchVerifier(PositionOffByOne()),
        "penalties without the tokens of the round": MatchVerifier(PenaltiesOfTheRoot()),
    }
