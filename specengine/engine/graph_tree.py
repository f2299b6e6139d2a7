"""The round of a draft tree as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch, Tree
from specengine.core.draft_choosing import DraftEdits
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.spec import TreeRowDrafter, VerifyResult
from specengine.engine.draft_nodes import HostTree
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_ruled import Drafted, RoundParts, Seen
from specengine.engine.round_form import Flight, Form, Wish
from specengine.engine.row_choices import Choosing
from specengine.kernels.accept_tree import AcceptedPaths, accept_tree
from specengine.kernels.kv_move import KVPaths
from specengine.kernels.tree_build import DraftTree

_MANY = 128  # tokens of a batch's whole trees, from which on smaller ones are worth a graph
_NONE: Mapping[int, Sequence[int]] = {}


class GraphTreeRound(GraphRound):
    """A GraphRound whose drafts branch: verification sees them through a mask, the KV of the path
    that stands moves to where a chain would have written it, and the drafter observes that path.

    Nodes lie in the places after what stands, whatever their depth. So all of these places must
    exist: within so many tokens of the context's end, requests that draft take the other round.
    """

    drafter: TreeRowDrafter
    sizes: Mapping[int, Sequence[int]] = _NONE  # by num_steps, set by whoever chooses among them

    @cached_property
    def num_slots(self) -> int:
        return max(self.drafter.num_tree_nodes(self.steps[-1]), self.drafter.row_slots)

    def smaller_trees(self, batch_size: int) -> dict[int, list[int]]:
        """Only where nodes cost: at small batch sizes the weights are all that is read."""
        return {
            steps: list(found)
            for steps, found in self.sizes.items()
            if batch_size * self.drafter.num_tree_nodes(steps) >= _MANY
        }

    def go_on(
        self, rows: RowBatch, output: RowsOutput, tree: DraftTree, form: Form
    ) -> AcceptedPaths:
        """By the path that stands."""
        paths = self.accept_tree(rows, output.best, tree, form.num_steps)
        if form.choosing.logprobs:
            self.logprobs.keep(paths.rows_T)
        self.choices.count(rows, paths.tokens_BW, paths.accepted_B, form.choosing)
        return paths

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        return (TreeParts if form.num_steps else RoundParts)(self, rows_B, form)

    def draft_edits(self, rows: RowBatch, choosing: Choosing) -> DraftEdits | None:
        return self.choices.edits.for_trees(rows) if choosing.edits else None

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

    def forms(self, batch_size: int, choosing: Choosing) -> list[Form]:
        smaller = self.smaller_trees(batch_size).items()
        forms = [Form(batch_size, k, choosing, num_nodes=n) for k, found in smaller for n in found]
        return [*forms, *super().forms(batch_size, choosing)]

    def _form(self, reqs: list[Req], wish: Wish) -> Form:
        """Of the whole tree where there is no graph of smaller ones, nor memory for it."""
        form = super()._form(reqs, wish)
        if wish.num_nodes is None:
            return form
        if wish.num_nodes not in self.smaller_trees(form.batch_size).get(form.num_steps, ()):
            return form
        smaller = form._replace(num_nodes=wish.num_nodes)
        is_there = smaller in self.captured or not self.runner.graph_memory.is_spent
        return smaller if is_there else form

    def follow(self, reqs: list[Req], wish: Wish) -> Flight | None:
        count, drafts = self.num_nodes + self.num_slots, self.steps[0] or any(wish.num_drafted)
        if drafts and not all(self.has_slots(req, count) for req in reqs):
            return None
        return super().follow(reqs, wish)

    def land(self, flight: Flight) -> VerifyResult:
        result = super().land(flight)
        if self.sizes and flight.form.num_steps:
            # Nodes stand best first: a node's number is its rank.
            paths = flight.outcome[:, flight.form.num_steps + 2 : -1].tolist()
            pairs = zip(paths, result.num_accepted, strict=True)
            result.path_ranks = [row[:count] for row, count in pairs]
        return result

    def num_drafts(self, flight: Flight, levels: list[int]) -> list[int]:
        counts = flight.drafted_nodes
        if counts is None:
            most = flight.form.num_nodes or self.num_slots
            sizes = [self.drafter.num_tree_nodes(n) if n else 1 for n in levels]
            counts = [min(size, most) - 1 for size in sizes]
        return flight.left(counts, levels)


class TreeParts(RoundParts):
    """Of a tree."""

    drafter: TreeRowDrafter
    graph_round: GraphTreeRound
    tree: DraftTree  # left behind by the drafting
    tokens_and_parents_2BN: Tensor  # likewise, where the host must know

    @torch.inference_mode()
    def draft(self) -> None:
        flying = self.graph_round
        rows = flying.begin(self.rows_B)
        edits = flying.draft_edits(rows, self.form.choosing)
        given = self.form.num_steps, edits, self.form.num_nodes
        self.leave(rows, self.drafter.draft_tree_rows(rows, *given))

    def leave(self, rows: RowBatch, tree: DraftTree) -> None:
        """What was drafted, to the other parts."""
        self.tree, self.drafted = tree, Drafted(rows, tree.tokens_BN[:, 1:])
        if self.form.choosing.masks:
            self.tokens_and_parents_2BN = torch.stack([tree.tokens_BN, tree.parents_BN])

    @torch.inference_mode()
    def look(self) -> None:
        batch = self.graph_round.batch_of(self.drafted.rows, self.tree)
        self.seen = Seen(batch, self.graph_round.runner.forward_extend(batch))

    @torch.inference_mode()
    def decide(self) -> None:
        flying, choosing, rows = self.graph_round, self.form.choosing, self.drafted.rows
        output = flying.choose(self.seen, rows, choosing)
        self.observe(rows, output, flying.go_on(rows, output, self.tree, self.form))

    def observe(self, rows: RowBatch, output: RowsOutput, paths: AcceptedPaths) -> None:
        """Keep what stands of all nodes, and show it to the drafter."""
        self.graph_round.keep(rows, paths)
        self.drafter.observe_rows(rows, _of_paths(output, paths), paths.tokens_BW, paths.accepted_B)

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
