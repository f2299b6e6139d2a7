"""Where the drafts of a round on the device come from: a model, lookup, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.core.batch import RowBatch
from specengine.core.draft_picks import DraftEdits, DraftPicks, TreeDraws
from specengine.core.drafter import Drafter
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.core.transfer import pinned
from specengine.engine.round.draws import DraftWeights, MixedWeights
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.kernels.tree_shape import tree_shape


@dataclass(frozen=True)
class DraftOptions:
    """How the drafts of one round are chosen; None throughout: the best tokens.

    picks: of chains. edits, limits, draws: of trees. weights: what `picks` or `draws` draw from,
    where the rule needs that; lookup_weights: the same, of rounds in which all drafts came from
    lookup.
    """

    picks: DraftPicks | None = None
    edits: DraftEdits | None = None
    limits: TreeLimits | None = None
    draws: TreeDraws | None = None
    weights: DraftWeights | None = None
    lookup_weights: DraftWeights | None = None


@dataclass(frozen=True)
class Drafts:
    """Of the requests in `rows`: chains, or trees of N nodes each."""

    rows: RowBatch
    tokens_BK: Tensor  # int64, the drafts without the root
    tree: DraftTree | None = None
    weights: DraftWeights | None = None
    numbers_BN: Tensor | None = None  # int64, as in SampledRound; of trees that a grammar cut
    host_copy: Tensor | None = None  # what the host must know of them, where a grammar asks

    @classmethod
    def of_tree(
        cls, rows: RowBatch, tree: DraftTree, weights: DraftWeights | None = None
    ) -> Drafts:
        return cls(rows, tree.tokens_BN[:, 1:], tree, weights)


class Source(Protocol):
    """Drafts for the rounds of one engine. All methods without a host's object in their arguments
    are captured."""

    is_tree: bool
    max_steps: int  # levels of the deepest round
    draft_slots: int  # KV slots past those that stand which drafting writes
    model_steps: int  # levels of a model's deepest draft; 0 where no model drafts
    model_is_tree: bool
    tree_topk: int  # children of a node of the model's trees; 1 of chains
    draws: bool  # drafts of requests that sample are sampled
    may_be_unready: bool  # is_ready may be False

    def is_ready(self, req: Req) -> bool:
        """As Drafter.is_ready."""
        ...

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts: ...

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        """As Drafter.observe_rows."""
        ...

    def num_nodes(self, num_steps: int) -> int:
        """Of the largest tree so deep, root included."""
        ...

    def tree_sizes(self, num_steps: int) -> set[int]:
        """Nodes of all trees that rounds so deep may have, root included."""
        ...

    def model_depth(self, key: RoundKey) -> int:
        """How deep a model drafts in such rounds."""
        ...

    def drawn_nodes(self, key: RoundKey) -> int:
        """Nodes of each request for which weights are kept where a model samples chains."""
        ...

    def counts_are_sent(self, key: RoundKey) -> bool:
        """Whether the host sends how many drafts each request has."""
        ...

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        """Drafts of lookup to the device, in the order of the round's requests -> the plan of that
        round. levels: how deep each request may draft."""
        ...

    def variants(self, steps: list[int]) -> list[tuple[int, int | None]]:
        """num_steps and model_steps of rounds that exist beside those of each number of steps."""
        ...

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        """The key of the round that serves a plan. key: without regard to the source."""
        ...

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        """Nodes of each tree, without the root, where requests drafted so many levels."""
        ...


class DeviceDraft:
    """A drafter whose rounds run on the device as a whole. Of no steps, it is plain decoding."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.is_tree = self.model_is_tree = drafter.proposes_tree
        self.max_steps = self.model_steps = drafter.max_steps
        self.draft_slots = drafter.draft_slots if drafter.proposes_tree else 0
        self.tree_topk = drafter.topk if drafter.proposes_tree else 1
        self.draws = drafter.emits_probs
        self.may_be_unready = drafter.may_be_unready

    def is_ready(self, req: Req) -> bool:
        return self.drafter.is_ready(req)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        steps = key.num_steps
        if not self.is_tree or not steps:
            drafts_BK = self.drafter.draft_rows(rows, steps, options.picks)
            return Drafts(rows, drafts_BK, None, options.weights)
        given = options.edits, key.num_nodes, options.limits, options.draws
        tree = self.drafter.draft_tree_rows(rows, steps, *given)
        return Drafts.of_tree(rows, tree, options.weights)

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        self.drafter.observe_rows(rows, output, tokens, accepted)

    def num_nodes(self, num_steps: int) -> int:
        if not self.is_tree or not num_steps:
            return 1 + num_steps
        return self.drafter.num_tree_nodes(num_steps)

    def tree_sizes(self, num_steps: int) -> set[int]:
        return {self.num_nodes(num_steps)}

    def model_depth(self, key: RoundKey) -> int:
        return key.num_steps

    def drawn_nodes(self, key: RoundKey) -> int:
        return 1 + key.num_steps

    def counts_are_sent(self, key: RoundKey) -> bool:
        return False

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        raise NotImplementedError("the host drafts nothing")

    def variants(self, steps: list[int]) -> list[tuple[int, int | None]]:
        return []

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        return key

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        most = in_flight.key.num_nodes or self.num_nodes(self.max_steps)
        return [min(self.num_nodes(level), most) - 1 for level in levels]


class LookupChains:
    """Chains that the host found in text, in a buffer that rounds read.

    Shorter chains are padded, with token 0 or with what earlier rounds left. A rule of matching
    accepts padding that happens to be right; other rules are told how many drafts there are.
    Rows past those of the last round hold what earlier ones had.
    """

    is_tree = False
    draft_slots = 0

    def __init__(self, batch_size: int, num_steps: int, device: torch.device) -> None:
        self.max_steps = num_steps
        # int64 [B, num_steps + 1]: drafts, and in the last column how many there are. So the drafts
        # begin where kernels like it (core/columns.py).
        self.buffer = torch.zeros(batch_size, num_steps + 1, dtype=torch.int64, device=device)

    def copy_in(self, proposal: DraftProposal, whole_rows: bool) -> RoundPlan:
        """whole_rows: padded with token 0, and with the counts."""
        drafts_BK = proposal.tokens[:, 1:]
        size, width = drafts_BK.shape
        if whole_rows:
            # A new array each time: the copy of the last one may be under way.
            rows = np.zeros((size, self.buffer.shape[1]), np.int64)
            rows[:, -1] = proposal.num_drafted
            exists_BK = np.arange(width) < rows[:, -1:]
            np.copyto(rows[:, :width], drafts_BK.numpy(), where=exists_BK)
            moved = pinned(torch.from_numpy(rows), self.buffer.device)
            self.buffer[:size].copy_(moved, non_blocking=True)
        elif width:
            moved = pinned(drafts_BK, self.buffer.device)
            self.buffer[:size, :width].copy_(moved, non_blocking=True)
        return RoundPlan(proposal.num_drafted)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        return Drafts(rows, self.buffer[: len(rows.rows_B), : key.num_steps])

    def exist(self, batch_size: int) -> Tensor:
        """bool [B], whether there is a draft of each of the first requests."""
        return self.buffer[:batch_size, -1] > 0

    def num_nodes(self, num_steps: int) -> int:
        return 1 + num_steps


class LookupTrees:
    """Trees that the host found in text, in a buffer that rounds read.

    Smaller trees are padded with nodes that are their own parents: no path from the root leads to
    one, so that none is ever accepted, whatever its token. Their KV goes to slots that no other
    node reads. Rows past those of the last round hold what earlier ones had.
    """

    is_tree = True
    draft_slots = 0

    def __init__(
        self, drafter: Drafter, max_nodes: int, batch_size: int, device: torch.device
    ) -> None:
        """max_nodes: of a tree, root included."""
        self.drafter = drafter
        self.max_steps = max_nodes - 1  # of a tree that does not branch
        self._padding = np.stack([np.zeros(max_nodes, np.int64), np.arange(max_nodes)])
        self._padding[1, 0] = -1
        # int64 [B, 2, max_nodes]: tokens and parents
        self.buffer = torch.from_numpy(self._padding).repeat(batch_size, 1, 1).to(device)

    def copy_in(self, proposal: DraftProposal, whole_rows: bool) -> RoundPlan:
        if proposal.is_empty:
            return RoundPlan(proposal.num_drafted, drafted_nodes=proposal.num_drafted)
        given_B2N = np.stack([proposal.tokens.numpy(), proposal.parents.numpy()], axis=1)
        size, _, width = given_B2N.shape
        exists_BN = np.arange(width) < np.array(proposal.num_nodes)[:, None]
        # A new array each time: the copy of the last one may be under way.
        nodes = np.tile(self._padding, (size, 1, 1))
        np.copyto(nodes[:, :, :width], given_B2N, where=exists_BN[:, None])
        moved = pinned(torch.from_numpy(nodes), self.buffer.device)
        self.buffer[:size].copy_(moved, non_blocking=True)
        levels = proposal.num_drafted
        if not proposal.is_chain:
            pairs = zip(nodes[:, 1].tolist(), proposal.num_nodes, strict=True)
            levels = [_depth(parents[:count]) for parents, count in pairs]
        return RoundPlan(levels, drafted_nodes=proposal.num_drafted)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        """The first nodes of a tree are a tree, for parents stand before their children."""
        if not key.num_steps:
            return Drafts(rows, rows.roots_B.new_empty(len(rows.roots_B), 0))
        count = self.num_nodes(key.num_steps)
        nodes_B2N = self.buffer[: len(rows.rows_B)]
        return Drafts.of_tree(rows, tree_shape(rows.roots_B, nodes_B2N, count, key.num_steps))

    def exist(self, batch_size: int) -> Tensor:
        """bool [B], whether there is a draft of each of the first requests. The first node behind a
        root is its child; where it does not exist, its own."""
        return self.buffer[:batch_size, 1, 1] == 0

    def num_nodes(self, num_steps: int) -> int:
        return self.drafter.num_tree_nodes(num_steps) if num_steps else 1


Lookup = LookupChains | LookupTrees


def make_lookup(
    drafter: Drafter, is_tree: bool, max_nodes: int, batch_size: int, device: torch.device
) -> Lookup:
    """max_nodes: of a draft, root included. batch_size: of the largest round."""
    if is_tree:
        return LookupTrees(drafter, max_nodes, batch_size, device)
    return LookupChains(batch_size, max_nodes - 1, device)


class LookupDraft:
    """The host drafts from text before each round that has drafts."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.is_tree, self.max_steps = lookup.is_tree, lookup.max_steps
        self.draft_slots = self.model_steps = 0
        self.model_is_tree = self.draws = self.may_be_unready = False
        self.tree_topk = 1

    def is_ready(self, req: Req) -> bool:
        return True

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        return self.lookup.draft(key, rows, options)

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        """The host reads the committed text."""

    def num_nodes(self, num_steps: int) -> int:
        return self.lookup.num_nodes(num_steps)

    def tree_sizes(self, num_steps: int) -> set[int]:
        return {self.num_nodes(num_steps)}

    def model_depth(self, key: RoundKey) -> int:
        return 0

    def drawn_nodes(self, key: RoundKey) -> int:
        return 1 + key.num_steps

    def counts_are_sent(self, key: RoundKey) -> bool:
        return True

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        return self.lookup.copy_in(proposal, whole_rows=False)

    def variants(self, steps: list[int]) -> list[tuple[int, int | None]]:
        return []

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        return key

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        counts = in_flight.drafted_nodes
        return [0] * len(levels) if counts is None else counts


class HybridDraft:
    """A model's drafts, and for requests of whose text the host found one, that draft instead.
    Lookup may go deeper than the model.

    Beside the rounds of the model alone there are rounds in which some drafts came from lookup, at
    each depth, so that the model drafts as deep there as was chosen; and rounds in which all did,
    where the model does not draft. The latter are at least as deep as the model could draft. What
    is deeper than the model came from lookup.
    """

    def __init__(self, model: DeviceDraft, lookup: Lookup, device: torch.device) -> None:
        """Trees where lookup's drafts are trees; the model may draft chains beside them."""
        self.model, self.lookup = model, lookup
        self.is_tree, self.max_steps = lookup.is_tree, lookup.max_steps
        self.draft_slots, self.draws = model.draft_slots, model.draws
        self.model_is_tree, self.tree_topk = model.is_tree, model.tree_topk
        self.model_steps = min(model.max_steps, lookup.max_steps)
        # Made before any capture: made in one, they would be nodes of the graph.
        self._nodes_N = nodes_N = torch.arange(lookup.max_steps + 1, device=device)
        self._above_N = nodes_N - 1
        self._padding_2N = torch.stack([torch.zeros_like(nodes_N), nodes_N])
        self.may_be_unready = model.may_be_unready

    def is_ready(self, req: Req) -> bool:
        return self.model.is_ready(req)

    def has_lookup(self, key: RoundKey) -> bool:
        """Whether a draft may have come from lookup in such rounds."""
        return key.model_steps is not None or key.num_steps > self.model_steps

    def model_depth(self, key: RoundKey) -> int:
        """How deep the model drafts in such rounds."""
        most = self.model_steps if key.model_steps is None else key.model_steps
        return min(most, key.num_steps)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        if not key.num_steps:
            return self.model.draft(key, rows, options)
        if self.is_tree:
            return self._draft_trees(key, rows, options)
        if not self.has_lookup(key):
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
        if not self.has_lookup(key):
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
            given = options.edits, None, options.limits, options.draws
            tree = drafter.draft_tree_rows(rows, depth, *given)
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
        """A model that drafted trees runs again what stands of them, whatever its source. Any other
        has not run what lookup drafted in its place."""
        drafter = self.model.drafter
        if self.has_lookup(key) and not (self.model.is_tree and self.model_depth(key)):
            drafter.sync_accepted(rows, tokens)
        drafter.observe_rows(rows, output, tokens, accepted)

    def num_nodes(self, num_steps: int) -> int:
        return max(self._model_num_nodes(num_steps), self.lookup.num_nodes(num_steps))

    def _model_num_nodes(self, num_steps: int) -> int:
        """Of the model's tree where so many levels are drafted, root included."""
        return self.model.num_nodes(min(num_steps, self.model_steps))

    def tree_sizes(self, num_steps: int) -> set[int]:
        sizes = {self.num_nodes(num_steps), self.lookup.num_nodes(num_steps)}
        return (
            sizes | {self._model_num_nodes(num_steps)} if num_steps <= self.model_steps else sizes
        )

    def drawn_nodes(self, key: RoundKey) -> int:
        if not self.is_tree or not self.has_lookup(key):
            return 1 + key.num_steps
        return self.num_nodes(key.num_steps)

    def counts_are_sent(self, key: RoundKey) -> bool:
        """Else drafts are as deep as limits and ends of requests let them be."""
        return self.has_lookup(key)

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        from_lookup = [count > 0 for count in proposal.num_drafted]
        pairs = zip(from_lookup, levels, strict=True)
        own = [0 if found else min(most, self.model_steps) for found, most in pairs]
        if proposal.is_empty:
            return RoundPlan(own)
        plan = self.lookup.copy_in(proposal, whole_rows=True)
        drafted = [*map(max, plan.num_drafted, own)]
        return plan._replace(num_drafted=drafted, model_steps=max(own), from_lookup=from_lookup)

    def variants(self, steps: list[int]) -> list[tuple[int, int | None]]:
        """Deeper than the model, drafts come from lookup in any case."""
        some = [(n, n) for n in steps if 0 < n <= self.model_steps]
        return [*some, *((n, 0) for n in steps if n >= self.model_steps)]

    def key_of(self, key: RoundKey, plan: RoundPlan) -> RoundKey:
        if plan.model_steps is None:
            return key
        if plan.model_steps == 0:
            return key._replace(num_steps=max(key.num_steps, self.model_steps), model_steps=0)
        deeper = key.num_steps > self.model_steps
        return key if deeper else key._replace(model_steps=key.num_steps)

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        counts = [self._model_num_nodes(level) - 1 for level in levels]
        found, nodes = in_flight.from_lookup, in_flight.drafted_nodes
        if found is None or nodes is None:
            return counts
        triples = zip(found, nodes, counts, strict=True)
        return [theirs if is_lookup else own for is_lookup, theirs, own in triples]


def _depth(parents: list[int]) -> int:
    """Of the deepest node; parents stand before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(1 + depths[parent])
    return max(depths)


def num_slots(source: Source) -> int:
    """KV slots past those that stand which a round writes, of each request."""
    if not source.is_tree:
        return source.max_steps + 1
    return max(source.num_nodes(source.max_steps), source.draft_slots)
