"""The round of draft trees under a verifier that weighs the target against the draft, as one
graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.interfaces import RowsOutput
from specengine.core.weighed_trees import WeighedTreeDrafter
from specengine.engine.graph_ruled import Drafted, RoundParts
from specengine.engine.graph_tree import GraphTreeRound, TreeParts
from specengine.engine.graph_weighed import WeighingRound
from specengine.engine.grounds import unweighed
from specengine.engine.host_trees import HostTrees
from specengine.engine.round_form import Flight, Form
from specengine.engine.row_tree_draws import RowTreeDraws, TreeNumbers
from specengine.kernels.accept_path import accept_path
from specengine.kernels.accept_sampled import SampledRound, row_sums
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.target.verify.sampled import SampledVerifier


class GraphWeighedTreeRound(WeighingRound, GraphTreeRound):
    """A GraphTreeRound whose rounds are decided by a rule wherever somebody samples.

    What a seed says follows from which nodes there are, and from their numbers: coins are keyed by
    them. So each request has the very tree that the host would draft for it, of no more nodes than
    it may still say tokens, and cut to the depth that it allows itself; what is missing to the
    largest tree does not exist for the rule. Trees are never cut to their best nodes here: seeds
    would follow from the clock. Those of text are the host's own.
    """

    drafter: WeighedTreeDrafter | HostTrees
    leaves_wishes = True

    def __init__(self, verifier: SampledVerifier, draws: bool, *given: Any) -> None:
        """draws: trees of requests that sample are sampled. given: as to GraphRound."""
        super().__init__(verifier, draws, *given)
        largest, device = self.batch_sizes[-1], self.runner.device
        # Made before any capture, in which they would be nodes of the graph.
        counts = {self.drafter.num_tree_nodes(steps) for steps in self.steps if steps}
        self.nodes_N = {n: torch.arange(n, device=device) for n in counts}
        self.roots_B = {n: n * torch.arange(largest, device=device) for n in counts}
        self.tree_numbers: TreeNumbers | None = None
        if draws and not isinstance(self.drafter, HostTrees):
            shape = largest, self.drafter.topk, self.steps[-1]
            self.tree_numbers = TreeNumbers.of(*shape, device)

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        if form.choosing.weighs and form.num_steps:
            return WeighedTreeParts(self, rows_B, form)
        return super().parts_of(rows_B, form)

    def tree_limits(self, rows: RowBatch) -> TreeLimits | None:
        """As DraftWorker.nodes has them on the host, and SpecControl, which cuts what was drafted.
        A request that has ended may be a round late in leaving, and drafts nothing. Trees of the
        host have kept to them."""
        if isinstance(self.drafter, HostTrees):
            return None
        ends_B = self.choices.ends.index_select(0, rows.rows_B)
        limits_B = self.state.limits.index_select(0, rows.rows_B)
        left_B = (ends_B - rows.lens_B - 1).clamp(min=1)
        return TreeLimits(self.drafter.topk, left_B, limits_B)

    def new_tree_draws(self, rows: RowBatch) -> RowTreeDraws | None:
        """Of one round; None where all drafts are the best tokens."""
        if self.tree_numbers is None:
            return None
        vocab_size, keeps = self.runner.model.vocab_size, self.verifier.needs_draft_probs
        return RowTreeDraws(rows, self.choices.table, self.tree_numbers, vocab_size, keeps)

    def sampled_tree(
        self, rows: RowBatch, tree: DraftTree, weights_TV: Tensor, draft_BNV: Tensor | None
    ) -> SampledRound:
        """What RoundProbs.of makes on the host. draft_BNV: float32, what drafts were drawn from."""
        batch_size, num_nodes = tree.tokens_BN.shape
        lacks_BN = tree.parents_BN == self.nodes_N[num_nodes]
        return SampledRound(
            target_TV=weights_TV,
            target_sum_T=row_sums(weights_TV),
            draft_BNV=draft_BNV,
            tokens_BN=tree.tokens_BN,
            parents_BN=tree.parents_BN.masked_fill(lacks_BN, 0).clamp(min=0),
            exists_BN=~lacks_BN,
            depths_BN=tree.depths_BN.masked_fill(lacks_BN, -1),
            roots_B=self.roots_B[num_nodes][:batch_size],
            greedy_B=self.are_greedy(rows),
        )

    def num_drafts(self, flight: Flight, levels: list[int]) -> list[int]:
        """Of rounds that weigh, as many as the rule saw, which the device tells."""
        if not flight.form.choosing.weighs or not flight.form.num_steps:
            return super().num_drafts(flight, levels)
        counts: list[int] = flight.outcome[:, -1].tolist()
        return counts


class WeighedTreeParts(TreeParts):
    """Of a tree that is weighed."""

    graph_round: GraphWeighedTreeRound
    draws: RowTreeDraws | None  # left behind by the drafting

    def __init__(self, graph_round: GraphWeighedTreeRound, rows_B: Tensor, form: Form) -> None:
        assert unweighed(form.choosing) is None, "can_run leaves it to the host"
        super().__init__(graph_round, rows_B, form)

    @torch.inference_mode()
    def draft(self) -> None:
        flying = self.graph_round
        rows = flying.begin(self.rows_B)
        self.draws = flying.new_tree_draws(rows)
        given = rows, self.form.num_steps, flying.tree_limits(rows)
        self.tree = flying.drafter.draft_limited_rows(*given, draws=self.draws)
        self.drafted = Drafted(rows, self.tree.tokens_BN[:, 1:])

    @torch.inference_mode()
    def decide(self) -> None:
        flying, rows, tree = self.graph_round, self.drafted.rows, self.tree
        logits_TV = flying.runner.model.compute_logits(self.seen.hidden_TH)
        weights_TV = flying.target_weights(logits_TV, rows)
        draft_BNV = None if self.draws is None else self.draws.drawn_from(tree)
        drafts = flying.sampled_tree(rows, tree, weights_TV, draft_BNV)
        found = flying.judge(drafts, flying.numbers(rows))
        given = found, tree, self.form.num_steps, flying.table.shape[1]
        paths = accept_path(flying.state, rows.rows_B, *given)
        tokens_T, features_TF = tree.tokens_BN.view(-1), self.seen.features()
        flying.observe(rows, RowsOutput(tokens_T, self.seen.hidden_TH, features_TF), paths)
