"""Drafts that the host finds in the text of requests, in buffers that rounds on the device read."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from specengine.core.drafter import Drafter
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import pinned
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.source import DraftOptions, Drafts, Source
from specengine.kernels.tree.tree_shape import tree_shape

_APART = 7907  # step between the tokens of one synthetic draft and the next


class LookupDraft(Source):
    """The host drafts from text before each round that has drafts, into a buffer that the round
    reads. `observe` has nothing to do: the host reads the committed text."""

    buffer: Tensor  # int64, a row a request; rows past the last round's hold drafts of earlier ones

    @abstractmethod
    def exist(self, batch_size: int) -> Tensor:
        """bool [B], whether there is a draft of each of the first requests."""

    def model_depth(self, key: RoundKey) -> int:
        return 0

    def counts_are_sent(self, key: RoundKey) -> bool:
        return True

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        counts = in_flight.plan.drafted_nodes
        return [0] * len(levels) if counts is None else counts


class LookupChains(LookupDraft):
    """Chains.

    Shorter chains are padded: with token 0 where they are counted, otherwise with tokens of earlier
    rounds. Matching accepts padding that happens to be right; other rules get the number of
    drafts.
    """

    is_tree = False

    def __init__(
        self, batch_size: int, num_steps: int, device: torch.device, counted: bool
    ) -> None:
        """counted: each copy carries the number of drafts as well, which `exist` reads; for rounds
        that ask which requests have a draft."""
        self.max_steps = num_steps
        self._counted = counted
        # int64 [B, num_steps], with one column more for the counts. The counts come last, so that
        # the drafts begin where kernels like it (core/columns.py). Without counts there is no such
        # column: a copy of whole chains is contiguous then, which takes the host half as long.
        self.buffer = torch.zeros(batch_size, num_steps + counted, dtype=torch.int64, device=device)

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        drafts_BK = proposal.tokens[:, 1:]
        size, width = drafts_BK.shape
        if self._counted:
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

    def pretend(self, batch_size: int, vocab_size: int) -> None:
        self.buffer[:batch_size, : self.max_steps] = _different(
            batch_size, self.max_steps, vocab_size, self.buffer.device
        )

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        return Drafts(rows, self.buffer[: len(rows.rows_B), : key.num_steps])

    def exist(self, batch_size: int) -> Tensor:
        assert self._counted
        return self.buffer[:batch_size, -1] > 0

    def num_nodes(self, num_steps: int) -> int:
        return 1 + num_steps


class LookupTrees(LookupDraft):
    """Trees.

    Smaller trees are padded with nodes that are their own parents: no path from the root leads to
    one, so that none is ever accepted, whatever its token. Their KV goes to slots that no other
    node reads.
    """

    is_tree = True

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

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
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
        depths = proposal.num_drafted
        if not proposal.is_chain:
            pairs = zip(nodes[:, 1].tolist(), proposal.num_nodes, strict=True)
            depths = [_depth(parents[:count]) for parents, count in pairs]
        return RoundPlan(depths, drafted_nodes=proposal.num_drafted)

    def pretend(self, batch_size: int, vocab_size: int) -> None:
        """Trees that do not branch."""
        nodes_2N, device = self.buffer.shape[1:], self.buffer.device
        different = _different(batch_size, nodes_2N[1], vocab_size, device)
        self.buffer[:batch_size, 0] = different
        self.buffer[:batch_size, 1] = torch.arange(nodes_2N[1], device=device) - 1

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        """The first nodes of a tree are a tree, for parents come before their children."""
        if not key.num_steps:
            return Drafts(rows, rows.roots_B.new_empty(len(rows.roots_B), 0))
        count = self.num_nodes(key.num_steps)
        nodes_B2N = self.buffer[: len(rows.rows_B)]
        return Drafts.of_tree(rows, tree_shape(rows.roots_B, nodes_B2N, count, key.num_steps))

    def exist(self, batch_size: int) -> Tensor:
        """The first node behind a root is its child; where it does not exist, its own."""
        return self.buffer[:batch_size, 1, 1] == 0

    def num_nodes(self, num_steps: int) -> int:
        return self.drafter.num_tree_nodes(num_steps) if num_steps else 1


def make_lookup(
    found_by: Drafter, drafter: Drafter, batch_size: int, device: torch.device
) -> LookupDraft:
    """found_by: of the lookup's drafts. drafter: of the round's, the same or a hybrid, whose rounds
    ask which requests have a draft of lookup's. batch_size: of the largest round."""
    if drafter.proposes_tree:
        return LookupTrees(found_by, drafter.max_nodes, batch_size, device)
    return LookupChains(batch_size, drafter.max_nodes - 1, device, counted=found_by is not drafter)


def _different(rows: int, columns: int, vocab_size: int, device: torch.device) -> Tensor:
    """int64 [rows, columns], tokens that do not repeat before the vocabulary ends."""
    places = torch.arange(rows * columns, device=device).view(rows, columns)
    return (places * _APART + 1) % vocab_size


def _depth(parents: list[int]) -> int:
    """The depth of the deepest node; parents come before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(1 + depths[parent])
    return max(depths)
