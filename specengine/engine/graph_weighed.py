"""Rounds under a verifier that weighs the target against the draft, as one graph: what they have in
common, and those of chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.interfaces import RowsOutput
from specengine.core.random_streams import Stream
from specengine.core.request import Req
from specengine.core.transfer import pinned
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.drafts import kept_nodes
from specengine.engine.grammar.masks import Flags
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_ruled import Drafted, RoundParts, depths_left
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.node_logits import node_logits
from specengine.engine.round_form import Flight, Form, LeftDepths, Wish
from specengine.engine.row_choices import Choosing
from specengine.engine.row_draws import RowDraws
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound, row_sums
from specengine.kernels.sample_rows import SEED, SHIFT, TEMPERATURE, Places
from specengine.kernels.weigh_rows import weigh_rows
from specengine.target.verify.match import MatchVerifier
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


class WeighingRound(GraphRound):
    """A GraphRound whose rounds are decided by a rule for sampled drafts wherever somebody samples;
    rounds of greedy requests alone are matched, as no rule accepts more.

    Drafts are drawn, weighed and judged by the numbers that DraftChoice and SampledVerifier take.
    What a seed says follows from the drafts here: so each request has those that the host would
    draft for it, and no others exist for the rule.
    """

    def __init__(self, verifier: MatchVerifier, draws: bool, *given: Any) -> None:
        """verifier: one whose tokens follow from the drafts. draws: drafts of requests that sample
        are sampled. given: as to GraphRound."""
        super().__init__(*given)
        self.verifier = verifier
        self.draws = draws
        self.choices.weighs = True

    def target_weights(self, logits_TV: Tensor, rows: RowBatch) -> Tensor:
        """float32 [T, V], written over edited logits: what plain decoding samples from after each
        node; all on the best token for greedy requests."""
        places = Places(rows.rows_B, rows.lens_B, len(logits_TV) // len(rows.rows_B))
        weigh_rows(logits_TV, self.choices.table, places, int(Stream.SAMPLE))
        return logits_TV

    def are_greedy(self, rows: RowBatch) -> Tensor:
        """bool [B]."""
        temperatures = self.choices.table.column(TEMPERATURE)
        return temperatures.index_select(0, rows.rows_B) == 0.0

    def numbers(self, rows: RowBatch) -> Draws:
        """What the uniforms of a round are keyed by."""
        words_B = self.choices.table.words.index_select(0, rows.rows_B)
        return keyed_draws(words_B[:, SEED], rows.lens_B + words_B[:, SHIFT])

    def judge(self, drafts: SampledRound, draws: Draws) -> Accepted:
        verifier = self.verifier
        assert isinstance(verifier, SampledVerifier)
        assert verifier.kernel is not None, "weigher() refuses verifiers that have none"
        return verifier.kernel(drafts, draws, backend=verifier.backend)

    def chain_picks(self, rows: RowBatch, choosing: Choosing, num_nodes: int) -> DraftPicks | None:
        """How chains of at most so many nodes, root included, are drafted; None: of the best."""
        if num_nodes > 1 and self.draws and choosing.weighs and choosing.samples:
            edits = self.choices.edits.for_chains(rows) if choosing.edits else None
            given = rows, self.choices.table, num_nodes, self.choices.vocab_size
            return RowDraws(*given, self.verifier.needs_draft_probs, edits)
        return self.choices.edited_best(rows) if choosing.edits else None

    def were_drawn(self, reqs: list[Req]) -> list[bool]:
        """Of each request whether its drafts are sampled: the rule must see which of them a grammar
        forbids, as where `constrain` gets draft_probs."""
        return [self.draws and not req.sampling.is_greedy for req in reqs]


class GraphWeighedRound(WeighingRound):
    """Of chains. How many drafts there are counts, too: none exists past a request's limit, past
    the last token but one that it may still say, past what its text gave, or past what its grammar
    allows."""

    def __init__(self, verifier: MatchVerifier, draws: bool, *given: Any) -> None:
        """As WeighingRound."""
        super().__init__(verifier, draws, *given)
        largest, device = self.batch_sizes[-1], self.runner.device
        self.chains = {n: ChainShape.of(largest, n + 1, device) for n in self.steps}
        # int64 [B], of each request of a round: drafts that the host has made, and those that
        # grammars leave; read where there is such a drafter, or a grammar.
        counts = torch.zeros(2, largest, dtype=torch.int64, device=device)
        self.num_drafted, self.num_allowed = counts

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        weighs = form.choosing.weighs and form.num_steps
        return (WeighedParts if weighs else RoundParts)(self, rows_B, form)

    def picks(self, rows: RowBatch, form: Form) -> DraftPicks | None:
        return self.chain_picks(rows, form.choosing, form.num_steps + 1)

    def found(
        self, drafted: Drafted, logits_TV: Tensor, batch: ForwardBatch, form: Form
    ) -> Accepted:
        """What the rule decides. logits_TV: edited, of the verification `batch`; may be written
        over."""
        weights_TV = self.target_weights(logits_TV, drafted.rows)
        drafts = self.sampled_round(drafted, weights_TV, form)
        return self.judge(drafts, self.numbers(drafted.rows))

    def sampled_round(self, drafted: Drafted, weights_TV: Tensor, form: Form) -> SampledRound:
        """What RoundProbs.of makes on the host."""
        rows, picks, chain = drafted.rows, drafted.picks, self.chain_of(drafted.drafts_BK)
        lacks_BN = chain.nodes_BN > self.levels(rows, form)[:, None]
        tokens_BN = torch.cat([rows.roots_B[:, None], drafted.drafts_BK], dim=1)
        return SampledRound(
            target_TV=weights_TV,
            target_sum_T=row_sums(weights_TV),
            draft_BNV=picks.weights_BNV if isinstance(picks, RowDraws) else None,
            tokens_BN=tokens_BN.masked_fill(lacks_BN, 0),
            parents_BN=chain.parents_BN.masked_fill(lacks_BN, 0),
            exists_BN=~lacks_BN,
            depths_BN=chain.nodes_BN.masked_fill(lacks_BN, -1),
            roots_B=chain.roots_B,
            greedy_B=self.are_greedy(rows),
        )

    def chain_of(self, drafts_BK: Tensor) -> ChainShape:
        batch_size, num_steps = drafts_BK.shape
        return self.chains[num_steps].first(batch_size)

    def levels(self, rows: RowBatch, form: Form) -> Tensor:
        """int64 [B], as DraftWorker.levels and limits of requests have it on the host: what is
        drafted and the token behind it must not go past the request's end. A request that has ended
        may be a round late in leaving, and drafts nothing. Of these what the host tells of."""
        ends_B = self.choices.ends.index_select(0, rows.rows_B)
        limits_B = self.state.limits.index_select(0, rows.rows_B)
        levels_B = limits_B.minimum(ends_B - rows.lens_B - 2).clamp(min=0)
        if self.is_told(form):
            levels_B = levels_B.minimum(self.num_drafted[: len(levels_B)])
        if form.choosing.masks:
            levels_B = levels_B.minimum(self.num_allowed[: len(levels_B)])
        return levels_B

    def is_told(self, form: Form) -> bool:
        """Whether the host tells a round how many drafts it has made of each request."""
        return isinstance(self.drafter, HostDrafter)

    def _fly(self, reqs: list[Req], wish: Wish, form: Form) -> Flight:
        if form.choosing.weighs and form.num_steps and self.is_told(form):
            self._tell(self.num_drafted, wish.num_drafted)
        return super()._fly(reqs, wish, form)

    def tell_kept(self, reqs: list[Req], trees: list[HostTree], legal_BN: Flags) -> LeftDepths:
        """What `constrain` leaves of drafts: of those that were drawn, the first that a grammar
        forbids as well, which the rule must see."""
        kept_BN = kept_nodes(legal_BN, trees, self.were_drawn(reqs))
        self._tell(self.num_allowed, (kept_BN.sum(1) - 1).tolist())
        return depths_left(reqs, trees, kept_BN)

    def _tell(self, counts_B: Tensor, counts: list[int]) -> None:
        moved = pinned(torch.tensor(counts), counts_B.device)
        counts_B[: len(counts)].copy_(moved, non_blocking=True)


class WeighedParts(RoundParts):
    """Of drafts that are weighed."""

    graph_round: GraphWeighedRound

    @torch.inference_mode()
    def decide(self) -> None:
        flying, choosing = self.graph_round, self.form.choosing
        rows, drafts_BK = self.drafted.rows, self.drafted.drafts_BK
        logits = node_logits(flying, self.seen, rows, choosing)
        found = flying.found(self.drafted, logits.edited_TV, self.seen.batch, self.form)
        said_BN = said(drafts_BK, found)
        # A draft past the path's end may be what follows it, too: it is not to be counted.
        nodes_BK = flying.chain_of(drafts_BK).nodes_BN[:, 1:]
        standing_BK = drafts_BK.masked_fill(nodes_BK > found.ends_B[:, None], -1)
        accepted_B = flying.accept(rows, said_BN, standing_BK)
        flying.choices.count(rows, said_BN, accepted_B, choosing)
        output = RowsOutput(said_BN.flatten(), self.seen.hidden_TH, self.seen.features())
        if logits.raw_TV is not None:
            flying.logprobs.take(logits.raw_TV, output.best)
        self.drafter.observe_rows(rows, output, said_BN, accepted_B)

    def tell(self, reqs: list[Req], trees: list[HostTree]) -> LeftDepths:
        legal_BN = self.graph_round.masks.send(reqs, trees)
        return self.graph_round.tell_kept(reqs, trees, legal_BN)


def said(drafts_BK: Tensor, found: Accepted) -> Tensor:
    """int64 [B, K + 1], the token that follows each node of the path; behind its end drafts, which
    are tokens that exist."""
    said_BN = torch.cat([drafts_BK, found.tokens_B[:, None]], dim=1)
    return said_BN.scatter(1, found.ends_B[:, None], found.tokens_B[:, None])
