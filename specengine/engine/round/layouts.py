"""How the drafts of a round are laid out: as chains, or as trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.transfer import pinned
from specengine.core.tree import Tree
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.masks import Flags
from specengine.engine.round.key import KeptDepths, RoundKey
from specengine.engine.round.masks import is_constrained
from specengine.engine.round.source import Drafts
from specengine.kernels.accept.accept_chain import accept_chain, commit_chain
from specengine.kernels.accept.accept_path import accept_path
from specengine.kernels.accept.accept_tree import accept_tree
from specengine.kernels.accept.types import Accepted, AcceptedPaths, RoundState, Simulated
from specengine.kernels.kv.types import KVPaths
from specengine.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Commit:
    """What moving requests on needs beside the drafts."""

    state: RoundState
    max_len: int  # the most tokens of a request
    simulated: Simulated | None  # an accepted length to force


@dataclass(frozen=True)
class Nodes:
    """The drafts of a round as stochastic rules read them, N nodes a request, the root first. Nodes
    that do not exist have token 0, parent 0 and depth -1."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, 0 for the root as well
    exists_BN: Tensor  # bool
    depths_BN: Tensor  # int64
    roots_B: Tensor  # int64, row of each root among all nodes
    counts_B: Tensor  # int64, N
    numbers_BN: Tensor | None = None  # int64, as in SampledRound


@dataclass(frozen=True)
class Room:
    """How much requests may draft, and where they end. int64 [B] each."""

    ends_B: Tensor  # tokens at which requests end at the latest
    limits_B: Tensor  # levels that requests allow


class Layout(ABC):
    """`send_counts` runs on the host before a round, `host_trees` and `send_kept` between its
    graphs. All others run inside captures: they may not wait for the device, nor branch on values
    that lie there."""

    @abstractmethod
    def verify_batch(self, runner: ModelRunner, drafts: Drafts) -> ForwardBatch: ...

    @abstractmethod
    def match(self, commit: Commit, drafts: Drafts, chosen_T: Tensor, steps: int) -> AcceptedPaths:
        """Accept the drafts that the target chose too, and move the requests on."""

    @abstractmethod
    def commit(self, commit: Commit, drafts: Drafts, found: Accepted, steps: int) -> AcceptedPaths:
        """Move the requests on by what a rule decided."""

    @abstractmethod
    def nodes(self, drafts: Drafts, room: Room, key: RoundKey, counts_are_sent: bool) -> Nodes: ...

    def constrained(self, drafts: Drafts) -> Drafts:
        """The drafts that grammars leave, as sent by `send_kept`; all, where `nodes` leaves out
        what grammars forbid."""
        return drafts

    def keep_kv(self, runner: ModelRunner, rows: RowBatch, path: AcceptedPaths) -> None:
        """Move the KV of the accepted path to where a chain would have written it, where
        it is not there."""
        return

    def send_counts(self, num_drafted: list[int]) -> None:
        """To the device, how many drafts the host has made for each request; nothing, where the
        drafts say it themselves."""
        return

    @abstractmethod
    def host_copy(self, drafts: Drafts) -> Tensor:
        """int64, what the host must know of the drafts to make token masks."""

    @abstractmethod
    def host_trees(self, copy: Tensor, reqs: list[Req], num_steps: int) -> list[HostTree]:
        """The drafts. copy: `host_copy`, on the host."""

    @abstractmethod
    def send_kept(self, reqs: list[Req], trees: list[HostTree], kept_BN: Flags) -> KeptDepths:
        """To the device, which nodes a stochastic rule may see under grammars. kept_BN: of these
        trees."""


class Chain(Layout):
    """Each node is the child of the one before. Verification needs no mask, and no KV moves."""

    def __init__(self, steps: list[int], batch_size: int, device: torch.device) -> None:
        """steps: drafts of each kind of round. batch_size: of the largest."""
        # Made before any capture: made in one, they would be nodes of the graph.
        self._nodes_BN = {
            n: torch.arange(n + 1, device=device).repeat(batch_size, 1) for n in steps
        }
        self._parents_BN = {n: (one - 1).clamp(min=0) for n, one in self._nodes_BN.items()}
        self._roots_B = {
            n: (n + 1) * torch.arange(batch_size, device=device) for n in self._nodes_BN
        }
        self._counts_B = {n: torch.full_like(one, n + 1) for n, one in self._roots_B.items()}
        # int64 [B], of each request of a round: drafts that the host has made, and drafts that
        # grammars leave. Read where the host drafts, or there is a grammar.
        counts = torch.zeros(2, batch_size, dtype=torch.int64, device=device)
        self.num_drafted, self.num_allowed = counts

    def verify_batch(self, runner: ModelRunner, drafts: Drafts) -> ForwardBatch:
        tokens_BN = drafts.rows.roots_B[:, None]
        if drafts.tokens_BK.shape[1]:
            tokens_BN = torch.cat([tokens_BN, drafts.tokens_BK], dim=1)
        return runner.new_row_batch(drafts.rows, tokens_BN)

    def match(self, commit: Commit, drafts: Drafts, chosen_T: Tensor, steps: int) -> AcceptedPaths:
        chosen_BN = chosen_T.view(len(drafts.rows.rows_B), -1)
        rows_B, tokens_BK, max_len = drafts.rows.rows_B, drafts.tokens_BK, commit.max_len
        accepted_B = accept_chain(
            commit.state, rows_B, chosen_BN, tokens_BK, max_len, commit.simulated
        )
        return AcceptedPaths(accepted_B, chosen_BN)

    def commit(self, commit: Commit, drafts: Drafts, found: Accepted, steps: int) -> AcceptedPaths:
        rows_B, tokens_BK = drafts.rows.rows_B, drafts.tokens_BK
        emitted_BN = commit_chain(commit.state, rows_B, tokens_BK, found, commit.max_len)
        return AcceptedPaths(found.ends_B, emitted_BN)

    def nodes(self, drafts: Drafts, room: Room, key: RoundKey, counts_are_sent: bool) -> Nodes:
        batch_size, steps = drafts.tokens_BK.shape
        nodes_BN = self._nodes_BN[steps][:batch_size]
        lacks_BN = nodes_BN > self._levels(drafts, room, key, counts_are_sent)[:, None]
        tokens_BN = torch.cat([drafts.rows.roots_B[:, None], drafts.tokens_BK], dim=1)
        return Nodes(
            tokens_BN=tokens_BN.masked_fill(lacks_BN, 0),
            parents_BN=self._parents_BN[steps][:batch_size].masked_fill(lacks_BN, 0),
            exists_BN=~lacks_BN,
            depths_BN=nodes_BN.masked_fill(lacks_BN, -1),
            roots_B=self._roots_B[steps][:batch_size],
            counts_B=self._counts_B[steps][:batch_size],
        )

    def _levels(self, drafts: Drafts, room: Room, key: RoundKey, counts_are_sent: bool) -> Tensor:
        """int64 [B], how many drafts exist: as on the host, where DraftWorker.levels and the limits
        of requests say so. What is drafted and the token behind it must not go past the request's
        end. A request that has ended may still be in a round, and drafts nothing."""
        levels_B = room.limits_B.minimum(room.ends_B - drafts.rows.lens_B - 2).clamp(min=0)
        if counts_are_sent:
            levels_B = levels_B.minimum(self.num_drafted[: len(levels_B)])
        if key.sampling.masks:
            levels_B = levels_B.minimum(self.num_allowed[: len(levels_B)])
        return levels_B

    def host_copy(self, drafts: Drafts) -> Tensor:
        return drafts.tokens_BK

    def host_trees(self, copy: Tensor, reqs: list[Req], num_steps: int) -> list[HostTree]:
        above = list(range(-1, num_steps))
        drafts = copy[: len(reqs)].tolist()
        return [HostTree([r.last_token, *run], above) for r, run in zip(reqs, drafts, strict=True)]

    def send_kept(self, reqs: list[Req], trees: list[HostTree], kept_BN: Flags) -> KeptDepths:
        self._send(self.num_allowed, (kept_BN.sum(1) - 1).tolist())
        return kept_depths(reqs, trees, kept_BN)

    def send_counts(self, num_drafted: list[int]) -> None:
        self._send(self.num_drafted, num_drafted)

    def _send(self, counts_B: Tensor, counts: list[int]) -> None:
        moved = pinned(torch.tensor(counts), counts_B.device)
        counts_B[: len(counts)].copy_(moved, non_blocking=True)


class Branching(Layout):
    """A tree of nodes a request. Verification sees them through a mask, and the KV of the accepted
    path moves to where a chain would have written it.

    Nodes lie in the slots behind the kept tokens, whatever their depth: all of these slots must
    exist.
    """

    def __init__(self, sizes: set[int], batch_size: int, device: torch.device) -> None:
        """sizes: nodes of each kind of tree, root included. batch_size: of the largest round."""
        # Made before any capture: made in one, they would be nodes of the graph.
        self._nodes_N = {n: torch.arange(n, device=device) for n in sizes}
        self._roots_B = {n: n * torch.arange(batch_size, device=device) for n in sizes}
        self._counts_B = {n: torch.full_like(one, n) for n, one in self._roots_B.items()}
        # The numbers of the nodes that grammars leave, -1 of others. Read where there is a grammar.
        shape = batch_size, max(sizes, default=1)
        self._numbers_BN = torch.zeros(shape, dtype=torch.int64, device=device)

    def verify_batch(self, runner: ModelRunner, drafts: Drafts) -> ForwardBatch:
        tree = drafts.tree
        assert tree is not None
        shape = Tree(tree.depths_BN.view(-1), tree.mask_BNN)
        return runner.new_row_batch(drafts.rows, tree.tokens_BN, tree=shape)

    def match(self, commit: Commit, drafts: Drafts, chosen_T: Tensor, steps: int) -> AcceptedPaths:
        tree = drafts.tree
        assert tree is not None
        chosen_BN = chosen_T.view(tree.tokens_BN.shape)
        state, rows_B = commit.state, drafts.rows.rows_B
        return accept_tree(state, rows_B, chosen_BN, tree, steps, commit.max_len, commit.simulated)

    def commit(self, commit: Commit, drafts: Drafts, found: Accepted, steps: int) -> AcceptedPaths:
        assert drafts.tree is not None
        rows_B = drafts.rows.rows_B
        return accept_path(commit.state, rows_B, found, drafts.tree, steps, commit.max_len)

    def nodes(self, drafts: Drafts, room: Room, key: RoundKey, counts_are_sent: bool) -> Nodes:
        """Nodes that do not exist are their own parents."""
        tree = drafts.tree
        assert tree is not None
        batch_size, num_nodes = tree.tokens_BN.shape
        lacks_BN = tree.parents_BN == self._nodes_N[num_nodes]
        return Nodes(
            tokens_BN=tree.tokens_BN,
            parents_BN=tree.parents_BN.masked_fill(lacks_BN, 0).clamp(min=0),
            exists_BN=~lacks_BN,
            depths_BN=tree.depths_BN.masked_fill(lacks_BN, -1),
            roots_B=self._roots_B[num_nodes][:batch_size],
            counts_B=self._counts_B[num_nodes][:batch_size],
            numbers_BN=drafts.numbers_BN,
        )

    def constrained(self, drafts: Drafts) -> Drafts:
        tree = drafts.tree
        assert tree is not None
        batch_size, num_nodes = tree.tokens_BN.shape
        numbers_BN = self._numbers_BN[:batch_size, :num_nodes]
        is_cut_BN = numbers_BN < 0
        parents_BN = self._nodes_N[num_nodes].where(is_cut_BN, tree.parents_BN)
        tokens_BN = tree.tokens_BN.masked_fill(is_cut_BN, 0)
        tree = replace(tree, tokens_BN=tokens_BN, parents_BN=parents_BN)
        return replace(drafts, tree=tree, numbers_BN=numbers_BN)

    def keep_kv(self, runner: ModelRunner, rows: RowBatch, path: AcceptedPaths) -> None:
        assert path.nodes_BW is not None
        table = runner.pools.req_to_token_pool.req_to_token
        paths = KVPaths(table, rows.rows_B, rows.lens_B, path.nodes_BW, path.accepted_B)
        runner.pools.token_to_kv_pool.keep_paths(paths)

    def host_copy(self, drafts: Drafts) -> Tensor:
        assert drafts.tree is not None
        return torch.stack([drafts.tree.tokens_BN, drafts.tree.parents_BN])

    def host_trees(self, copy: Tensor, reqs: list[Req], num_steps: int) -> list[HostTree]:
        tokens, parents = copy[:, : len(reqs)].tolist()
        return [HostTree(*pair) for pair in zip(tokens, parents, strict=True)]

    def send_kept(self, reqs: list[Req], trees: list[HostTree], kept_BN: Flags) -> KeptDepths:
        """With the numbers that the nodes then have, by which coins are keyed. How many drafts the
        rule saw, the device reports: no depths are needed."""
        numbers_BN = np.where(kept_BN, kept_BN.cumsum(axis=1) - 1, -1)
        size, num_nodes = numbers_BN.shape
        moved = pinned(torch.from_numpy(numbers_BN), self._numbers_BN.device)
        self._numbers_BN[:size, :num_nodes].copy_(moved, non_blocking=True)
        return {}


def kept_depths(reqs: list[Req], trees: list[HostTree], kept_BN: Flags) -> KeptDepths:
    """The depths of the nodes that its grammar leaves, by request that has one."""
    rows = zip(reqs, trees, kept_BN.tolist(), strict=True)
    return {
        i: tree.depths_of(kept) for i, (req, tree, kept) in enumerate(rows) if is_constrained(req)
    }
