"""Drafts of a model on the device, and of lookup where it has one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal
from specengine.engine.round.device_draft import DeviceDraft
from specengine.engine.round.draws import MixedWeights
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.kinds import Variants, hybrid_variants
from specengine.engine.round.lookup import LookupDraft, LookupTrees
from specengine.engine.round.source import DraftOptions, Drafts, Source
from specengine.kernels.tree.tree_shape import tree_shape
from specengine.kernels.tree.types import DraftTree


class HybridDraft(Source):
    """A model's drafts, and for requests of whose text the host found one, that draft instead.
    Lookup may go deeper than the model.

    Its rounds by num_steps and model_steps of their key:

    - (k, None), k as deep as the model drafts at most: it drafts alone.
    - (k, None), deeper: it drafts all that it can, and some drafts came from lookup.
    - (k, k): it drafts k levels, and some drafts came from lookup.
    - (k, 0), at least as deep as the model could draft: all drafts came from lookup.

    With a model of 3 levels and lookup of 7: where one request has a draft of 5 tokens from lookup
    and another has none, (7, None) runs; where the one has 2, (3, 3); where both have 5, (7, 0).
    """

    def __init__(self, model: DeviceDraft, lookup: LookupDraft, device: torch.device) -> None:
        """Trees where lookup's drafts are trees; the model may draft chains beside them."""
        self.model, self.lookup = model, lookup
        self.is_tree, self.max_steps = lookup.is_tree, lookup.max_steps
        self.draft_slots, self.emits_probs = model.draft_slots, model.emits_probs
        self.model_is_tree, self.tree_topk = model.is_tree, model.tree_topk
        self.model_steps = min(model.max_steps, lookup.max_steps)
        # Made before any capture: made in one, they would be nodes of the graph.
        self._nodes_N = nodes_N = torch.arange(lookup.max_steps + 1, device=device)
        self._above_N = nodes_N - 1
        self._padding_2N = torch.stack([torch.zeros_like(nodes_N), nodes_N])
        self.may_be_unready = model.may_be_unready

    def is_ready(self, req: Req) -> bool:
        return self.model.is_ready(req)

    def may_use_lookup(self, key: RoundKey) -> bool:
        """Whether a draft may have come from lookup in such rounds."""
        return key.model_steps is not None or key.num_steps > self.model_steps

    def model_depth(self, key: RoundKey) -> int:
        most = self.model_steps if key.model_steps is None else key.model_steps
        return min(most, key.num_steps)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        if not key.num_steps:
            return self.model.draft(key, rows, options)
        if self.is_tree:
            return self._draft_trees(key, rows, options)
        if not self.may_use_lookup(key):
            return self.model.draft(key, rows, options)
        return self._draft_chains(key, rows, options)

    def _draft_chains(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        drafts_BK = self.lookup.draft(key, rows, options).tokens_BK
        exist_B = self.lookup.exist(len(rows.rows_B))
        if most := self.model_depth(key):
            own_BM = self.model.drafter.draft_rows(rows, most, options.picks)
            first_BM = torch.where(exist_B[:, None], drafts_BK[:, :most], own_BM)
            deeper = key.num_steps > most
            drafts_BK = torch.cat([first_BM, drafts_BK[:, most:]], 1) if deeper else first_BM
        if options.picks is not None:
            options.picks.override(drafts_BK, exist_B)
        return Drafts(rows, drafts_BK, None, options.weights)

    def _draft_trees(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        depth = self.model_depth(key)
        if not depth:
            drafts = self.lookup.draft(key, rows, options)
            return replace(drafts, weights=options.lookup_weights)
        if not self.may_use_lookup(key):
            return Drafts.of_tree(rows, self._model_tree(key, rows, options), options.weights)
        own_B2N, candidates_BN = self._model_nodes(depth, rows, options)
        mixed = self._mixed(rows, own_B2N, key.num_steps)
        if candidates_BN is not None:
            missing = mixed.tokens_BN.shape[1] - candidates_BN.shape[1]
            mixed = replace(mixed, candidates_BN=pad(candidates_BN, (0, missing)))
        weights = options.weights
        if weights is not None:
            weights = MixedWeights(weights, self.lookup.exist(len(rows.rows_B)))
        return Drafts.of_tree(rows, mixed, weights)

    def _model_tree(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> DraftTree:
        """Where no draft came from lookup."""
        steps = key.num_steps
        if self.model.is_tree:
            tree = self.model.draft(key, rows, options).tree
            assert tree is not None
            return tree
        own_B2N, _ = self._model_nodes(steps, rows, options)
        return tree_shape(rows.roots_B, own_B2N, 1 + steps, steps)

    def _model_nodes(
        self, depth: int, rows: RowBatch, options: DraftOptions
    ) -> tuple[Tensor, Tensor | None]:
        """int64 [B, 2, N], the model's tokens and parents, and the candidates of limited trees."""
        drafter = self.model.drafter
        if self.model.is_tree:
            tree = drafter.draft_tree_rows(
                rows, depth, options.edits, None, options.limits, options.draws
            )
            return torch.stack([tree.tokens_BN, tree.parents_BN], dim=1), tree.candidates_BN
        count, picks = 1 + depth, options.edits if options.picks is None else options.picks
        drafts_BK = drafter.draft_rows(rows, depth, picks)
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        nodes_B2N = torch.stack([tokens_BN, self._above_N[:count].expand_as(tokens_BN)], dim=1)
        limits = options.limits
        if limits is None:
            return nodes_B2N, None
        levels_B = limits.depths_B.minimum(limits.nodes_B - 1)
        exists_BN = self._nodes_N[:count] <= levels_B[:, None]
        return torch.where(exists_BN[:, None], nodes_B2N, self._padding_2N[:, :count]), None

    def _mixed(self, rows: RowBatch, own_B2N: Tensor, num_steps: int) -> DraftTree:
        """Lookup's trees where there are any, else the model's."""
        assert isinstance(self.lookup, LookupTrees)
        count = self.num_nodes(num_steps)
        if own_B2N.shape[2] < count:
            padding_2N = self._padding_2N[:, own_B2N.shape[2] : count]
            own_B2N = torch.cat([own_B2N, padding_2N.expand(len(own_B2N), -1, -1)], dim=2)
        lookup_B2N = self.lookup.buffer[: len(own_B2N), :, :count]
        exist_B11 = self.lookup.exist(len(own_B2N))[:, None, None]
        nodes_B2N = torch.where(exist_B11, lookup_B2N, own_B2N)
        return tree_shape(rows.roots_B, nodes_B2N, count, num_steps)

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        """A model that drafted trees runs the accepted path again, whatever its source. Any other
        has not run what lookup drafted in its place."""
        drafter = self.model.drafter
        if self.may_use_lookup(key) and not (self.model.is_tree and self.model_depth(key)):
            drafter.sync_accepted(rows, tokens)
        drafter.observe_rows(rows, output, tokens, accepted)

    def num_nodes(self, num_steps: int) -> int:
        return max(self._model_num_nodes(num_steps), self.lookup.num_nodes(num_steps))

    def _model_num_nodes(self, num_steps: int) -> int:
        """Nodes of the model's tree where so many levels are drafted, root included."""
        return self.model.num_nodes(min(num_steps, self.model_steps))

    def tree_sizes(self, num_steps: int) -> set[int]:
        sizes = {self.num_nodes(num_steps), self.lookup.num_nodes(num_steps)}
        return (
            sizes | {self._model_num_nodes(num_steps)} if num_steps <= self.model_steps else sizes
        )

    def drawn_nodes(self, key: RoundKey) -> int:
        if not self.is_tree or not self.may_use_lookup(key):
            return 1 + key.num_steps
        return self.num_nodes(key.num_steps)

    def counts_are_sent(self, key: RoundKey) -> bool:
        """Else drafts are as deep as limits and ends of requests let them be."""
        return self.may_use_lookup(key)

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        from_lookup = [count > 0 for count in proposal.num_drafted]
        pairs = zip(from_lookup, levels, strict=True)
        own = [0 if found else min(most, self.model_steps) for found, most in pairs]
        if proposal.is_empty:
            return RoundPlan(own)
        plan = self.lookup.send(proposal, levels)
        deepest = [*map(max, plan.levels, own)]
        return plan._replace(levels=deepest, model_steps=max(own), from_lookup=from_lookup)

    def variants(self, steps: list[int]) -> Variants:
        return hybrid_variants(steps, self.model_steps)

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        if plan.model_steps is None:
            return key
        if plan.model_steps == 0:
            return key._replace(num_steps=max(key.num_steps, self.model_steps), model_steps=0)
        deeper = key.num_steps > self.model_steps
        return key if deeper else key._replace(model_steps=key.num_steps)

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        counts = [self._model_num_nodes(level) - 1 for level in levels]
        found, nodes = in_flight.plan.from_lookup, in_flight.plan.drafted_nodes
        if found is None or nodes is None:
            return counts
        triples = zip(found, nodes, counts, strict=True)
        return [theirs if is_lookup else own for is_lookup, theirs, own in triples]
