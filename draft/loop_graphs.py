"""A round's whole draft in one CUDA graph, for rounds whose tokens the host has a part in."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from specengine.core.batch import RowBatch, ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import (
    DraftProposal,
    HesitantRowDrafter,
    RowDrafter,
    TreeRowDrafter,
)
from specengine.core.transfer import pinned
from specengine.core.weighed_trees import WeighedTreeDrafter
from specengine.draft.row_edits import RowEdits, is_exact
from specengine.kernels.tree_build import TreeLimits
from specengine.runner import fallbacks
from specengine.runner.fallbacks import NoGraphs
from specengine.runner.graph_cache import Graph, GraphCache
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.model_runner import ModelRunner


@runtime_checkable
class LoopDrafter(RowDrafter, Protocol):
    """A RowDrafter with a model."""

    runner: ModelRunner
    target_ids: Tensor | None
    emits_probs: bool

    def nodes(self, req: Req) -> int:
        """The most nodes that a request can use in this round, root included."""
        ...


@dataclass(frozen=True)
class DraftRows:
    """What a loop leaves: N nodes a request, the root first."""

    tokens_BN: Tensor
    parents_BN: Tensor


@dataclass(frozen=True)
class LoopBuffers:
    inputs_4B: Tensor  # rows of the page table, lengths, roots, most nodes; row 0 pads
    drafted: DraftRows
    edits: RowEdits | None


class LoopKey(NamedTuple):
    """What one graph drafts."""

    batch_size: int
    num_steps: int
    edited: bool


def draws_trees(drafter: object) -> bool:
    """Whether a drafter grows trees on the device alone, and need not say what it drew from."""
    if not isinstance(drafter, WeighedTreeDrafter) or drafter.tree_row_steps is None:
        return False
    return not getattr(drafter, "emits_probs", False)


def draws_chains(drafter: object) -> bool:
    """Whether a drafter drafts chains on the device alone, and need not say what it drew from."""
    if not isinstance(drafter, RowDrafter) or drafter.row_steps is None:
        return False
    return not getattr(drafter, "emits_probs", False)


class NoDraftLoops(NoGraphs):
    """Stands in for DraftLoops where a drafter cannot have them."""

    def draft(self, batch: ScheduleBatch, levels: list[int]) -> None:
        self.count()


class DraftLoops:
    """Draft loops of a drafter that needs nothing from the host, captured when first needed."""

    def __init__(
        self,
        drafter: LoopDrafter,
        batch_sizes: tuple[int, ...],
        padding: bool,
        counters: Counter[str],
        weighed: bool = False,
    ) -> None:
        """batch_sizes: ascending. padding: let a larger graph serve a batch. weighed: the verifier
        is stochastic, so that the text of a seed depends on the drafts of sampled requests."""
        self.drafter = drafter
        self.runner = drafter.runner
        self.batch_sizes = batch_sizes
        self.padding = padding
        memory = self.runner.graph_memory
        self.cache = GraphCache[LoopKey, LoopBuffers](
            "draft loop", memory, self._guard_of, counters
        )
        self.counters = counters
        self.weighed = weighed
        self.draws_trees = draws_trees(drafter)
        # Asked once: a protocol is looked at in 20 us, which each round would wait for.
        self._hesitant = drafter if isinstance(drafter, HesitantRowDrafter) else None

    def _guard_of(self, buffers: LoopBuffers) -> GraphGuard | None:
        return self.runner.guard_of(loops=self, inputs=buffers.inputs_4B, edits=buffers.edits)

    def draft(self, batch: ScheduleBatch, levels: list[int]) -> DraftProposal | None:
        """levels: how deep each request may draft, the largest at least 1. None where no graph
        serves the batch; counts the reason."""
        key = self._key_of(batch, max(levels))
        if isinstance(key, str):
            self.cache.count_fallback(key)
            return None
        captured = self.cache.get(key, self._make)
        loop = captured.buffers
        most = [self.drafter.nodes(req) for req in batch.reqs] if self.draws_trees else levels
        inputs_4B = self._inputs(batch.reqs, levels, most, key.batch_size)
        loop.inputs_4B.copy_(inputs_4B, non_blocking=True)
        if loop.edits is not None:
            loop.edits.fill(batch.sampling, self.drafter.target_ids)
        self.cache.replay(captured)
        return self._proposal(loop.drafted, levels, most)

    def _key_of(self, batch: ScheduleBatch, steps: int) -> LoopKey | str:
        """The key of the graph that serves a batch, or the fallback reason."""
        if batch.batch_size > self.batch_sizes[-1]:
            return fallbacks.BATCH_TOO_LARGE
        if not self.padding and batch.batch_size not in self.batch_sizes:
            return fallbacks.SIZE_NOT_CAPTURED
        sampling, edited = batch.sampling, batch.sampling.edits is not None
        if self.weighed and not sampling.all_greedy and not is_exact(sampling):
            return fallbacks.EDITS_FOLLOW_DRAFTS
        drafter = self._hesitant
        if drafter is not None and not all(map(drafter.is_ready, batch.reqs)):
            return fallbacks.DRAFTER_NOT_READY
        slots = self._slots(steps)
        if not all(req.reserved_len >= req.kv_len + slots for req in batch.reqs):
            return fallbacks.NEARLY_FULL
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch.batch_size)]
        key = LoopKey(size, steps, edited)
        return key if self.cache.has_memory_for(key) else fallbacks.MEMORY_SPENT

    def _slots(self, steps: int) -> int:
        """That drafts and their verification take up."""
        if self.draws_trees and isinstance(self.drafter, TreeRowDrafter):
            return max(self.drafter.num_tree_nodes(steps), self.drafter.row_slots)
        return steps + 1

    def _inputs(self, reqs: list[Req], levels: list[int], most: list[int], size: int) -> Tensor:
        """int64 [4, size]. Requests that draft nothing pad. most: nodes, root included; of chains
        nobody looks."""
        pad = [0] * (size - len(reqs))
        rows = [req.req_pool_idx if level else 0 for req, level in zip(reqs, levels, strict=True)]
        lens, roots = [req.kv_len for req in reqs], [req.last_token for req in reqs]
        told = [rows + pad, lens + pad, roots + pad, most + [1] * len(pad)]
        return pinned(torch.tensor(told), self.runner.device)

    def _proposal(self, drafted: DraftRows, levels: list[int], most: list[int]) -> DraftProposal:
        # Copies: a graph of verification may write where this one has left its tokens.
        tokens_BN = drafted.tokens_BN[: len(levels)].clone()
        parents_BN = drafted.parents_BN[: len(levels)].clone()
        if not self.draws_trees:
            return DraftProposal(tokens_BN, parents_BN, [1 + n for n in levels], is_chain=True)
        drafter = cast(WeighedTreeDrafter, self.drafter)
        whole = [drafter.num_tree_nodes(level) if level else 1 for level in levels]
        num_nodes = list(map(min, whole, most))
        ranks = [range(count) for count in num_nodes]
        return DraftProposal(tokens_BN, parents_BN, num_nodes, is_chain=False, ranks=ranks)

    @torch.inference_mode()
    def _make(self, key: LoopKey) -> tuple[Graph, LoopBuffers]:
        device = self.runner.device
        inputs_4B = torch.ones(4, key.batch_size, dtype=torch.int64, device=device)
        inputs_4B[:3].zero_()
        edits = None
        if key.edited:
            vocab = self.runner.model.vocab_size
            edits = RowEdits.neutral(key.batch_size, vocab, device)
        rows = RowBatch(*inputs_4B[:3])
        run = partial(self._run, rows, inputs_4B[3], key.num_steps, edits)
        graph, drafted = self.cache.record(run)
        return graph, LoopBuffers(inputs_4B, drafted, edits)

    def _run(self, rows: RowBatch, most_B: Tensor, steps: int, edits: RowEdits | None) -> DraftRows:
        if isinstance(self.drafter, WeighedTreeDrafter) and self.draws_trees:
            limits = TreeLimits(self.drafter.topk, most_B, most_B)
            tree = self.drafter.draft_limited_rows(rows, steps, limits, edits=edits)
            return DraftRows(tree.tokens_BN, tree.parents_BN)
        drafts_BK = self.drafter.draft_rows(rows, steps, edits)
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        above_N = torch.arange(-1, steps, device=tokens_BN.device)
        return DraftRows(tokens_BN, above_N.expand_as(tokens_BN).contiguous())
