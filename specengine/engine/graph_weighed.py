"""The round of sampled chains, or of chains before sampling requests, under a verifier that weighs
the target against the draft, as one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.interfaces import RowsOutput
from specengine.core.random_streams import Stream
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_ruled import Drafted, RoundParts
from specengine.engine.round_form import Form
from specengine.engine.row_draws import RowDraws
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound, row_sums
from specengine.kernels.sample_rows import SEED, SHIFT, TEMPERATURE, Places
from specengine.kernels.weigh_rows import weigh_rows
from specengine.target.verify.sampled import SampledVerifier, keyed_draws


@dataclass(frozen=True)
class ChainShape:
    """Of chains of N nodes in B requests, each of which has all its rows. Made before any capture,
    in which it would be nodes of the graph."""

    nodes_BN: Tensor  # int64, 0 .. N - 1
    parents_BN: Tensor  # int64, 0 for the root as well
    roots_B: Tensor  # int64, row of each root

    @classmethod
    def of(cls, batch_size: int, num_nodes: int, device: torch.device) -> ChainShape:
        nodes_BN = torch.arange(num_nodes, device=device).repeat(batch_size, 1)
        roots_B = num_nodes * torch.arange(batch_size, device=device)
        return cls(nodes_BN, (nodes_BN - 1).clamp(min=0), roots_B)

    def first(self, batch_size: int) -> ChainShape:
        """Of the first requests."""
        given = self.nodes_BN, self.parents_BN, self.roots_B
        return ChainShape(*(each[:batch_size] for each in given))


class GraphWeighedRound(GraphRound):
    """A GraphRound whose rounds are decided by a rule for sampled drafts wherever somebody samples;
    rounds of greedy requests alone are matched, as no rule accepts more.

    What a seed says follows from the drafts here, and from how many there are. So whatever the host
    would not draft does not exist for the rule: what lies past a request's limit, or past the last
    token but one that it may still say. Drafts are drawn, weighed and judged by the numbers that
    DraftChoice and SampledVerifier take.
    """

    def __init__(self, verifier: SampledVerifier, draws: bool, *given: Any) -> None:
        """draws: drafts of requests that sample are sampled. given: as to GraphRound."""
        super().__init__(*given)
        self.verifier = verifier
        self.draws = draws
        self.choices.weighs = True
        largest, device = self.batch_sizes[-1], self.runner.device
        self.chains = {n: ChainShape.of(largest, n + 1, device) for n in self.steps}

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        weighs = form.choosing.weighs and form.num_steps
        return (WeighedParts if weighs else RoundParts)(self, rows_B, form)

    def new_draws(self, rows: RowBatch, num_steps: int) -> RowDraws | None:
        """Of one round; None where all drafts are the best tokens."""
        if not self.draws:
            return None
        vocab_size, keeps = self.runner.model.vocab_size, self.verifier.needs_draft_probs
        return RowDraws(rows, self.choices.table, num_steps + 1, vocab_size, keeps)

    def target_weights(self, hidden_TH: Tensor, rows: RowBatch, num_nodes: int) -> Tensor:
        """float32 [T, V], what plain decoding samples from after each node; all on the best token
        for greedy requests."""
        weights_TV = self.runner.model.compute_logits(hidden_TH)
        places = Places(rows.rows_B, rows.lens_B, num_nodes)
        weigh_rows(weights_TV, self.choices.table, places, int(Stream.SAMPLE))
        return weights_TV

    def sampled_round(
        self, rows: RowBatch, drafts_BK: Tensor, weights_TV: Tensor, draft_BNV: Tensor | None
    ) -> SampledRound:
        """What RoundProbs.of makes on the host. draft_BNV: float32, what drafts were drawn from."""
        chain = self.chain_of(drafts_BK)
        lacks_BN = chain.nodes_BN > self.levels(rows)[:, None]
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        temperatures = self.choices.table.column(TEMPERATURE)
        return SampledRound(
            target_TV=weights_TV,
            target_sum_T=row_sums(weights_TV),
            draft_BNV=draft_BNV,
            tokens_BN=tokens_BN.masked_fill(lacks_BN, 0),
            parents_BN=chain.parents_BN.masked_fill(lacks_BN, 0),
            exists_BN=~lacks_BN,
            depths_BN=chain.nodes_BN.masked_fill(lacks_BN, -1),
            roots_B=chain.roots_B,
            greedy_B=temperatures.index_select(0, rows.rows_B) == 0.0,
        )

    def chain_of(self, drafts_BK: Tensor) -> ChainShape:
        batch_size, num_steps = drafts_BK.shape
        return self.chains[num_steps].first(batch_size)

    def levels(self, rows: RowBatch) -> Tensor:
        """int64 [B], as DraftWorker.levels and limits of requests have it on the host: what is
        drafted and the token behind it must not go past the request's end. A request that has ended
        may be a round late in leaving, and drafts nothing."""
        ends_B = self.choices.ends.index_select(0, rows.rows_B)
        limits_B = self.state.limits.index_select(0, rows.rows_B)
        return limits_B.minimum(ends_B - rows.lens_B - 2).clamp(min=0)

    def numbers(self, rows: RowBatch) -> Draws:
        """What the uniforms of a round are keyed by."""
        words_B = self.choices.table.words.index_select(0, rows.rows_B)
        return keyed_draws(words_B[:, SEED], rows.lens_B + words_B[:, SHIFT])

    def judge(self, drafts: SampledRound, draws: Draws) -> Accepted:
        kernel = self.verifier.kernel
        assert kernel is not None, "weigher() refuses verifiers that have none"
        return kernel(drafts, draws, backend=self.verifier.backend)


class WeighedParts(RoundParts):
    """Of drafts that are weighed."""

    graph_round: GraphWeighedRound
    draws: RowDraws | None  # left behind by the drafting

    @torch.inference_mode()
    def draft(self) -> None:
        flying, num_steps = self.graph_round, self.form.num_steps
        rows = flying.begin(self.rows_B)
        self.draws = flying.new_draws(rows, num_steps)
        self.drafted = Drafted(rows, flying.drafter.draft_rows(rows, num_steps, self.draws))

    @torch.inference_mode()
    def decide(self) -> None:
        flying, rows, drafts_BK = self.graph_round, self.drafted.rows, self.drafted.drafts_BK
        hidden_TH, num_nodes = self.seen.hidden_TH, self.form.num_steps + 1
        weights_TV = flying.target_weights(hidden_TH, rows, num_nodes)
        draft_BNV = None if self.draws is None else self.draws.weights_BNV
        drafts = flying.sampled_round(rows, drafts_BK, weights_TV, draft_BNV)
        found = flying.judge(drafts, flying.numbers(rows))
        said_BN = said(drafts_BK, found)
        # A draft past the path's end may be what follows it, too: it is not to be counted.
        nodes_BK = flying.chain_of(drafts_BK).nodes_BN[:, 1:]
        standing_BK = drafts_BK.masked_fill(nodes_BK > found.ends_B[:, None], -1)
        accepted_B = flying.accept(rows, said_BN, standing_BK)
        output = RowsOutput(said_BN.flatten(), hidden_TH, _features(self.seen.batch))
        flying.drafter.observe_rows(rows, output, said_BN, accepted_B)


def said(drafts_BK: Tensor, found: Accepted) -> Tensor:
    """int64 [B, K + 1], the token that follows each node of the path; behind its end drafts, which
    are tokens that exist."""
    said_BN = torch.cat([drafts_BK, found.tokens_B[:, None]], dim=1)
    return said_BN.scatter(1, found.ends_B[:, None], found.tokens_B[:, None])


def _features(batch: ForwardBatch) -> Tensor | None:
    return torch.cat(batch.captured, dim=-1) if batch.captured else None
