"""The round of draft trees under a verifier that weighs the target against the draft, as one
graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.transfer import pinned
from specengine.core.weighed_trees import WeighedTreeDrafter
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.drafts import kept_nodes
from specengine.engine.grammar.masks import Flags
from specengine.engine.graph_ruled import RoundParts
from specengine.engine.graph_tree import GraphTreeRound, TreeParts
from specengine.engine.graph_weighed import WeighingRound
from specengine.engine.host_trees import HostTrees
from specengine.engine.node_logits import node_logits
from specengine.engine.round_form import Flight, Form, LeftDepths
from specengine.engine.row_choices import Choosing
from specengine.engine.row_tree_draws import RowTreeDraws, TreeNumbers, TreeWeights
from specengine.engine.row_tree_edits import EditsOfNodes
from specengine.kernels.accept_path import accept_path
from specengine.kernels.accept_sampled import Accepted, SampledRound, row_sums
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.target.verify.match import MatchVerifier


@dataclass(frozen=True)
class DraftedTree:
    rows: RowBatch
    tree: DraftTree
    numbers_BN: Tensor | None  # as of SampledRound
    draws: TreeWeights | None  # by which it was drafted


@dataclass(frozen=True)
class Grown:
    tree: DraftTree
    draws: TreeWeights | None


class GraphWeighedTreeRound(WeighingRound, GraphTreeRound):
    """A GraphTreeRound whose rounds are decided by a rule wherever somebody samples.

    What a seed says follows from which nodes there are, and from their numbers: coins are keyed by
    them. So each request has the very tree that the host would draft for it, of no more nodes than
    it may still say tokens, and cut to the depth that it allows itself; what is missing to the
    largest tree does not exist for the rule. Trees are never cut to their best nodes here: seeds
    would follow from the clock. Those of text are the host's own.
    """

    def __init__(self, verifier: MatchVerifier, draws: bool, *given: Any) -> None:
        """draws: trees of requests that sample are sampled. given: as to GraphRound."""
        super().__init__(verifier, draws, *given)
        largest, device = self.batch_sizes[-1], self.runner.device
        # Made before any capture, in which they would be nodes of the graph.
        counts = self.tree_sizes()
        self.nodes_N = {n: torch.arange(n, device=device) for n in counts}
        self.roots_B = {n: n * torch.arange(largest, device=device) for n in counts}
        # Of the nodes that grammars leave, their numbers; -1 of others. Read where there is one.
        self.numbers_BN = torch.zeros(largest, max(counts), dtype=torch.int64, device=device)
        self.grower = self.new_grower()
        self.tree_numbers: TreeNumbers | None = None
        if draws and isinstance(self.grower, WeighedTreeDrafter):
            assert self.grower.tree_row_steps is not None
            shape = largest, self.grower.topk, self.grower.tree_row_steps
            self.tree_numbers = TreeNumbers.of(*shape, device)

    def new_grower(self) -> WeighedTreeDrafter | HostTrees | None:
        """Who grows trees within limits."""
        assert isinstance(self.drafter, WeighedTreeDrafter | HostTrees)
        return self.drafter

    def tree_sizes(self) -> set[int]:
        """Nodes of all trees that there may be, root included."""
        return {self.drafter.num_tree_nodes(steps) for steps in self.steps if steps}

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        if form.choosing.weighs and form.num_steps:
            return WeighedTreeParts(self, rows_B, form)
        return super().parts_of(rows_B, form)

    def tree_limits(self, rows: RowBatch) -> TreeLimits | None:
        """As DraftWorker.nodes has them on the host, and SpecControl, which cuts what was drafted.
        A request that has ended may be a round late in leaving, and drafts nothing. Trees of the
        host have kept to them."""
        if isinstance(self.grower, HostTrees):
            return None
        ends_B = self.choices.ends.index_select(0, rows.rows_B)
        limits_B = self.state.limits.index_select(0, rows.rows_B)
        left_B = (ends_B - rows.lens_B - 1).clamp(min=1)
        return TreeLimits(1 if self.grower is None else self.grower.topk, left_B, limits_B)

    def grow(self, rows: RowBatch, form: Form) -> Grown:
        return self.grow_deep(rows, form.num_steps, form.choosing)

    def grow_deep(self, rows: RowBatch, num_steps: int, choosing: Choosing) -> Grown:
        """What the grower grows, of so many levels."""
        assert self.grower is not None
        draws, edits = self.new_tree_draws(rows), self.node_edits(rows, choosing)
        given = rows, num_steps, self.tree_limits(rows), edits, draws
        return Grown(self.grower.draft_limited_rows(*given), draws)

    def new_tree_draws(self, rows: RowBatch) -> RowTreeDraws | None:
        """Of one round; None where all drafts are the best tokens."""
        if self.tree_numbers is None:
            return None
        vocab_size, keeps = self.runner.model.vocab_size, self.verifier.needs_draft_probs
        return RowTreeDraws(rows, self.choices.table, self.tree_numbers, vocab_size, keeps)

    def node_edits(self, rows: RowBatch, choosing: Choosing) -> EditsOfNodes | None:
        """Of one round."""
        return EditsOfNodes(self.choices.edits.tables, rows) if choosing.edits else None

    def tell_kept(self, reqs: list[Req], trees: list[HostTree], legal_BN: Flags) -> None:
        """What `constrain` leaves of trees, and the numbers that its nodes then have: coins are
        keyed by them."""
        kept_BN = kept_nodes(legal_BN, trees, self.were_drawn(reqs))
        numbers_BN = np.where(kept_BN, kept_BN.cumsum(axis=1) - 1, -1)
        size, num_nodes = numbers_BN.shape
        moved = pinned(torch.from_numpy(numbers_BN), self.numbers_BN.device)
        self.numbers_BN[:size, :num_nodes].copy_(moved, non_blocking=True)

    def numbers_of(self, tree: DraftTree) -> Tensor:
        """int64 [B, N], as the host has told them."""
        batch_size, num_nodes = tree.tokens_BN.shape
        return self.numbers_BN[:batch_size, :num_nodes]

    def within(self, tree: DraftTree, numbers_BN: Tensor) -> DraftTree:
        """What has no number is not there."""
        is_cut_BN = numbers_BN < 0
        parents_BN = self.nodes_N[tree.tokens_BN.shape[1]].where(is_cut_BN, tree.parents_BN)
        tokens_BN = tree.tokens_BN.masked_fill(is_cut_BN, 0)
        return replace(tree, tokens_BN=tokens_BN, parents_BN=parents_BN)

    def found(self, drafted: DraftedTree, logits_TV: Tensor, batch: ForwardBatch) -> Accepted:
        """What the rule decides. logits_TV: edited, of the verification `batch`; may be written
        over."""
        weights_TV = self.target_weights(logits_TV, drafted.rows)
        return self.judge(self.sampled_tree(drafted, weights_TV), self.numbers(drafted.rows))

    def sampled_tree(self, drafted: DraftedTree, weights_TV: Tensor) -> SampledRound:
        """What RoundProbs.of makes on the host."""
        tree, draws = drafted.tree, drafted.draws
        batch_size, num_nodes = tree.tokens_BN.shape
        lacks_BN = tree.parents_BN == self.nodes_N[num_nodes]
        return SampledRound(
            target_TV=weights_TV,
            target_sum_T=row_sums(weights_TV),
            draft_BNV=None if draws is None else draws.drawn_from(tree),
            tokens_BN=tree.tokens_BN,
            parents_BN=tree.parents_BN.masked_fill(lacks_BN, 0).clamp(min=0),
            exists_BN=~lacks_BN,
            depths_BN=tree.depths_BN.masked_fill(lacks_BN, -1),
            roots_B=self.roots_B[num_nodes][:batch_size],
            greedy_B=self.are_greedy(drafted.rows),
            numbers_BN=drafted.numbers_BN,
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
    draws: TreeWeights | None  # left behind by the drafting

    @torch.inference_mode()
    def draft(self) -> None:
        flying, form = self.graph_round, self.form
        rows = flying.begin(self.rows_B)
        grown = flying.grow(rows, form)
        self.draws = grown.draws
        self.leave(rows, grown.tree)

    @torch.inference_mode()
    def decide(self) -> None:
        flying, rows, tree = self.graph_round, self.drafted.rows, self.tree
        choosing, numbers_BN = self.form.choosing, None
        if choosing.masks:
            numbers_BN = flying.numbers_of(tree)
            tree = flying.within(tree, numbers_BN)
        logits = node_logits(flying, self.seen, rows, choosing)
        drafted = DraftedTree(rows, tree, numbers_BN, self.draws)
        found = flying.found(drafted, logits.edited_TV, self.seen.batch)
        given = found, tree, self.form.num_steps, flying.table.shape[1]
        paths = accept_path(flying.state, rows.rows_B, *given)
        flying.choices.count(rows, paths.tokens_BW, paths.accepted_B, choosing)
        if logits.raw_TV is not None:
            raw_TV = logits.raw_TV.index_select(0, paths.rows_T)
            flying.logprobs.take(raw_TV, paths.tokens_BW.flatten())
        tokens_T, features_TF = tree.tokens_BN.view(-1), self.seen.features()
        self.observe(rows, RowsOutput(tokens_T, self.seen.hidden_TH, features_TF), paths)

    def tell(self, reqs: list[Req], trees: list[HostTree]) -> LeftDepths:
        """How many drafts the rule sees, the device tells."""
        legal_BN = self.graph_round.masks.send(reqs, trees)
        self.graph_round.tell_kept(reqs, trees, legal_BN)
        return {}
