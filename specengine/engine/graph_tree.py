"""The round of a draft tree as one graph."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch, Tree
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.spec import TreeRowDrafter, VerifyResult
from specengine.engine.draft_nodes import HostTree
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_ruled import Drafted, RoundParts, Seen
from specengine.engine.round_form import Flight, Form
from specengine.kernels.accept_tree import AcceptedPaths, accept_tree
from specengine.kernels.kv_move import KVPaths
from specengine.kernels.tree_build import DraftTree


class GraphTreeRound(GraphRound):
    """A GraphRound whose drafts branch: verification sees them through a mask, the KV of the path
    that stands moves to where a chain would have written it, and the drafter observes that path.

    Nodes lie in the places after what stands, whatever their depth. So all of these places must
    exist: within so many tokens of the context's end, requests take the other round.
    """

    drafter: TreeRowDrafter

    @property
    def num_slots(self) -> int:
        return max(self.drafter.num_tree_nodes(self.steps[-1]), self.drafter.row_slots)

    def go_on(self, rows: RowBatch, output: RowsOutput, tree: DraftTree, form: Form) -> None:
        """By the path that stands."""
        paths = self.accept_tree(rows, output.best, tree, form.num_steps)
        self.keep(rows, paths)
        if form.choosing.logprobs:
            self.logprobs.keep(paths.rows_T)
        self.choices.count(rows, paths.tokens_BW, paths.accepted_B, form.choosing)
        self.drafter.observe_rows(rows, _of_paths(output, paths), paths.tokens_BW, paths.accepted_B)

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        return (TreeParts if form.num_steps else RoundParts)(self, rows_B, form)

    def batch_of(self, rows: RowBatch, tree: DraftTree) -> ForwardBatch:
        """The verification."""
        shape = Tree(tree.depths_BN.view(-1), tree.mask_BNN)
        return self.runner.new_row_batch(rows, tree.tokens_BN, tree=shape)

    def accept_tree(
        self, rows: RowBatch, chosen_T: Tensor, tree: DraftTree, num_steps: int
    ) -> AcceptedPaths:
        """Moves the requests on, and tells the host."""
        chosen_BN = chosen_T.view(tree.tokens_BN.shape)
        given = rows.rows_B, chosen_BN, tree, num_steps, self.table.shape[1], self.simulated
        return accept_tree(self.state, *given)

    def keep(self, rows: RowBatch, paths: AcceptedPaths) -> None:
        """The target's KV of the accepted paths, as if they had been chains."""
        given = rows.rows_B, rows.lens_B, paths.nodes_BW, paths.accepted_B
        self.runner.pools.token_to_kv_pool.keep_paths(KVPaths(self.table, *given))

    def has_slots(self, req: Req, count: int) -> bool:
        return req.reserved_len >= req.kv_len + count

    def follow(
        self, reqs: list[Req], num_drafted: list[int], asleep: bool = False
    ) -> Flight | None:
        count = self.num_nodes + self.num_slots
        if not all(self.has_slots(req, count) for req in reqs):
            return None
        return super().follow(reqs, num_drafted, asleep)

    def land(self, flight: Flight) -> VerifyResult:
        drafted = [self.drafter.num_tree_nodes(n) - 1 if n else 0 for n in flight.num_drafted]
        return replace(super().land(flight), num_drafted=drafted)


class TreeParts(RoundParts):
    """Of a tree."""

    graph_round: GraphTreeRound
    tree: DraftTree  # left behind by the drafting
    tokens_and_parents_2BN: Tensor  # likewise

    @torch.inference_mode()
    def draft(self) -> None:
        flying = self.graph_round
        rows = flying.begin(self.rows_B)
        edits = flying.draft_edits(rows, self.form.choosing)
        self.tree = flying.drafter.draft_tree_rows(rows, self.form.num_steps, edits)
        self.drafted = Drafted(rows, self.tree.tokens_BN[:, 1:])
        self.tokens_and_parents_2BN = torch.stack([self.tree.tokens_BN, self.tree.parents_BN])

    @torch.inference_mode()
    def look(self) -> None:
        batch = self.graph_round.batch_of(self.drafted.rows, self.tree)
        self.seen = Seen(batch, self.graph_round.runner.forward_extend(batch))

    @torch.inference_mode()
    def decide(self) -> None:
        flying, choosing, rows = self.graph_round, self.form.choosing, self.drafted.rows
        output = flying.choose(self.seen.hidden_TH, self.seen.batch, rows, choosing)
        flying.go_on(rows, output, self.tree, self.form)

    @property
    def shown(self) -> Tensor:
        return self.tokens_and_parents_2BN

    def trees(self, shown: Tensor, reqs: list[Req]) -> list[HostTree]:
        tokens, parents = shown[:, : len(reqs)].tolist()
        return [HostTree(*pair) for pair in zip(tokens, parents, strict=True)]


def _of_paths(output: RowsOutput, paths: AcceptedPaths) -> RowsOutput:
    """Of all nodes' rows those on the accepted paths."""
    features = None
    if output.features is not None:
        features = output.features.index_select(0, paths.rows_T)
    hidden = output.hidden.index_select(0, paths.rows_T)
    return RowsOutput(paths.tokens_BW.flatten(), hidden, features)
