"""Rounds of a model's drafts and of text under a verifier that weighs drafts, or relaxes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.core.batch import RowBatch
from specengine.core.weighed_trees import WeighedTreeDrafter
from specengine.engine.graph_hybrid import GraphHybridRound, GraphHybridTreeRound
from specengine.engine.graph_relaxed import GraphRelaxedRound, GraphRelaxedTreeRound
from specengine.engine.graph_weighed import GraphWeighedRound
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound, Grown
from specengine.engine.host_trees import HostTrees
from specengine.engine.hybrid_drafts import MixedDrafts
from specengine.engine.hybrid_trees import HybridTrees
from specengine.engine.round_form import Form
from specengine.engine.row_choices import Choosing
from specengine.engine.row_draws import RowDraws, make_certain_
from specengine.engine.row_tree_draws import TreeWeights
from specengine.kernels.tree_build import DraftTree
from specengine.kernels.tree_shape import tree_shape


class GraphWeighedHybridRound(GraphWeighedRound, GraphHybridRound):
    """Of chains. Drafts of text were certain, as draft.hybrid has it; how many there are of each
    request, a model's or a text's, the host tells."""

    drafter: MixedDrafts

    def is_told(self, form: Form) -> bool:
        """Else drafts are as deep as limits and ends let them be."""
        return self.has_text(form)


class GraphRelaxedHybridRound(GraphRelaxedRound, GraphWeighedHybridRound):
    """Likewise."""


class GraphWeighedHybridTreeRound(GraphWeighedTreeRound, GraphHybridTreeRound):
    """Of trees, if only one of both drafts these. Limits are the model's: the host has kept to
    them."""

    drafter: HybridTrees

    def new_grower(self) -> WeighedTreeDrafter | HostTrees | None:
        """None: the model drafts chains."""
        grown = self.drafter.grown
        assert grown is None or isinstance(grown, WeighedTreeDrafter)
        return grown

    def tree_sizes(self) -> set[int]:
        drafts, drafted = self.drafter, [steps for steps in self.steps if steps]
        own = {drafts.own_nodes(steps) for steps in drafted if steps <= drafts.model_steps}
        of_text = {drafts.text.num_tree_nodes(steps) for steps in drafted}
        return own | of_text | super().tree_sizes()

    def grow(self, rows: RowBatch, form: Form) -> Grown:
        drafts, steps, size = self.drafter, form.num_steps, len(rows.rows_B)
        weighs_draws = self.draws and self.verifier.needs_draft_probs
        if form.model_steps == 0:
            tree = drafts.text.draft_tree_rows(rows, steps)
            return Grown(tree, TextWeights(self.choices.vocab_size) if weighs_draws else None)
        is_alone = not self.has_text(form)
        count = (drafts.own_nodes if is_alone else drafts.num_tree_nodes)(steps)
        own = self._grow_own(rows, min(steps, drafts.model_steps), form.choosing, count)
        if is_alone:
            return own
        mixed = _beside(drafts, rows, own.tree, steps)
        if own.draws is None or not weighs_draws:
            return Grown(mixed, None)
        return Grown(mixed, MixedWeights(own.draws, drafts.has_text(size)))

    def _grow_own(self, rows: RowBatch, num_steps: int, choosing: Choosing, count: int) -> Grown:
        """The model's. count: nodes of the trees that the rule sees."""
        if self.grower is not None:
            return self.grow_deep(rows, num_steps, choosing)
        picks = self.chain_picks(rows, choosing, count)
        own_B2N = self.drafter.chains(rows, num_steps, picks, self.tree_limits(rows))
        tree = tree_shape(rows.roots_B, own_B2N, 1 + num_steps, num_steps)
        return Grown(tree, picks if isinstance(picks, RowDraws) else None)


class GraphRelaxedHybridTreeRound(GraphRelaxedTreeRound, GraphWeighedHybridTreeRound):
    """Likewise."""


@dataclass(frozen=True)
class TextWeights:
    """As TreeWeights, where all have text, or draft nothing."""

    vocab_size: int

    def drawn_from(self, tree: DraftTree) -> Tensor | None:
        tokens_BN = tree.tokens_BN
        size = *tokens_BN.shape, self.vocab_size
        return torch.zeros(size, device=tokens_BN.device).scatter_(2, tokens_BN[:, :, None], 1.0)


@dataclass(frozen=True)
class MixedWeights:
    """Likewise, where some have text."""

    own: TreeWeights
    has_text_B: Tensor  # bool

    def drawn_from(self, tree: DraftTree) -> Tensor | None:
        weights_BNV = self.own.drawn_from(tree)
        if weights_BNV is not None:
            weights_BNV.masked_fill_(self.has_text_B[:, None, None], 0.0)
            make_certain_(weights_BNV, tree.tokens_BN, self.has_text_B)
        return weights_BNV


def _beside(drafts: HybridTrees, rows: RowBatch, own: DraftTree, num_steps: int) -> DraftTree:
    """The model's trees where there is no text's."""
    mixed = drafts.mixed(rows, torch.stack([own.tokens_BN, own.parents_BN], dim=1), num_steps)
    if own.candidates_BN is None:
        return mixed
    missing = mixed.tokens_BN.shape[1] - own.tokens_BN.shape[1]
    return replace(mixed, candidates_BN=pad(own.candidates_BN, (0, missing)))
