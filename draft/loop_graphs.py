"""A round's whole draft in one CUDA graph, for rounds whose tokens the host has a part in."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.platform import Graph
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import pinned
from specengine.draft.row_edits import RowEdits, is_exact
from specengine.runner import fallbacks
from specengine.runner.fallbacks import NoGraphs
from specengine.runner.forward_graphs.keys import at_least, why_no_size
from specengine.runner.graph_cache import GraphCache
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.model_runner import ModelRunner


class ModelDrafter(Drafter):
    """A drafter that runs a model."""

    runner: ModelRunner
    target_ids: Tensor | None

    @abstractmethod
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
    inputs_3B: Tensor  # rows of the page table, lengths, roots; row 0 pads
    drafted: DraftRows
    edits: RowEdits | None


class LoopKey(NamedTuple):
    """What one graph drafts."""

    batch_size: int
    num_steps: int
    edited: bool


def can_loop(drafter: Drafter) -> bool:
    """Whether a drafter drafts on the device alone, and need not report what it drew from."""
    return drafter.drafts_on == "device" and not drafter.emits_probs


class NoDraftLoops(NoGraphs):
    """Takes the place of DraftLoops where a drafter cannot have them."""

    def draft(self, batch: ScheduleBatch, levels: list[int]) -> None:
        self.count()


class DraftLoops:
    """Draft loops of a drafter that needs nothing from the host, captured when first needed."""

    def __init__(
        self,
        drafter: ModelDrafter,
        batch_sizes: tuple[int, ...],
        padding: bool,
        counters: Counter[str],
        text_depends_on_drafts: bool = False,
    ) -> None:
        """batch_sizes: ascending. padding: let a larger graph serve a batch.
        text_depends_on_drafts: of requests that sample, the text of a seed does."""
        self.drafter = drafter
        self.runner = drafter.runner
        self.batch_sizes = batch_sizes
        self.padding = padding
        memory = self.runner.graph_memory
        self.cache = GraphCache[LoopKey, LoopBuffers](
            "draft loop", memory, self._guard_of, counters
        )
        self.counters = counters
        self.text_depends_on_drafts = text_depends_on_drafts

    def _guard_of(self, buffers: LoopBuffers) -> GraphGuard | None:
        return self.runner.guard_of(loops=self, inputs=buffers.inputs_3B, edits=buffers.edits)

    def draft(self, batch: ScheduleBatch, levels: list[int]) -> DraftProposal | None:
        """levels: how deep each request may draft, the largest at least 1. None where no graph
        serves the batch; counts the reason."""
        key = self._key_of(batch, max(levels))
        if isinstance(key, str):
            self.cache.count_fallback(key)
            return None
        captured = self.cache.get(key, self._make)
        loop = captured.buffers
        inputs_3B = self._inputs(batch.reqs, levels, key.batch_size)
        loop.inputs_3B.copy_(inputs_3B, non_blocking=True)
        if loop.edits is not None:
            loop.edits.fill(batch.sampling, self.drafter.target_ids)
        self.cache.replay(captured)
        return self._proposal(loop.drafted, batch.reqs, levels)

    def _key_of(self, batch: ScheduleBatch, steps: int) -> LoopKey | str:
        """The key of the graph that serves a batch, or the fallback reason."""
        reason = why_no_size(self.batch_sizes, self.padding, batch.batch_size)
        if reason is not None:
            return reason
        sampling, edited = batch.sampling, batch.sampling.edits is not None
        if self.text_depends_on_drafts and not sampling.all_greedy and not is_exact(sampling):
            return fallbacks.EDITS_FOLLOW_DRAFTS
        drafter = self.drafter
        if drafter.may_be_unready and not all(map(drafter.is_ready, batch.reqs)):
            return fallbacks.DRAFTER_NOT_READY
        slots = self._slots(steps)
        if not all(req.reserved_len >= req.kv_len + slots for req in batch.reqs):
            return fallbacks.NEARLY_FULL
        size = at_least(self.batch_sizes, batch.batch_size)
        key = LoopKey(size, steps, edited)
        return key if self.cache.has_memory_for(key) else fallbacks.MEMORY_SPENT

    def _slots(self, steps: int) -> int:
        """KV slots that drafts and their verification take up."""
        if self.drafter.proposes_tree:
            return max(self.drafter.num_tree_nodes(steps), self.drafter.draft_slots)
        return steps + 1

    def _inputs(self, reqs: list[Req], levels: list[int], size: int) -> Tensor:
        """int64 [3, size]. Requests that draft nothing pad."""
        pad = [0] * (size - len(reqs))
        rows = [req.req_pool_idx if level else 0 for req, level in zip(reqs, levels, strict=True)]
        lens, roots = [req.kv_len for req in reqs], [req.last_token for req in reqs]
        return pinned(torch.tensor([rows + pad, lens + pad, roots + pad]), self.runner.device)

    def _proposal(self, drafted: DraftRows, reqs: list[Req], levels: list[int]) -> DraftProposal:
        # Copies: a graph of verification may write where this one has left its tokens.
        tokens_BN = drafted.tokens_BN[: len(levels)].clone()
        parents_BN = drafted.parents_BN[: len(levels)].clone()
        if not self.drafter.proposes_tree:
            return DraftProposal(tokens_BN, parents_BN, [1 + n for n in levels], is_chain=True)
        whole = [self.drafter.num_tree_nodes(level) if level else 1 for level in levels]
        # The first n nodes are the tree of n nodes, whatever was found below them.
        num_nodes = [min(pair) for pair in zip(whole, map(self.drafter.nodes, reqs), strict=True)]
        ranks = [range(count) for count in num_nodes]
        return DraftProposal(tokens_BN, parents_BN, num_nodes, is_chain=False, ranks=ranks)

    @torch.inference_mode()
    def _make(self, key: LoopKey) -> tuple[Graph, LoopBuffers]:
        device = self.runner.device
        inputs_3B = torch.zeros(3, key.batch_size, dtype=torch.int64, device=device)
        edits = None
        if key.edited:
            vocab = self.runner.model.vocab_size
            edits = RowEdits.neutral(key.batch_size, vocab, device)
        run = partial(self._run, RowBatch(*inputs_3B), key.num_steps, edits)
        graph, drafted = self.cache.record(run)
        return graph, LoopBuffers(inputs_3B, drafted, edits)

    def _run(self, rows: RowBatch, steps: int, edits: RowEdits | None) -> DraftRows:
        if self.drafter.proposes_tree:
            tree = self.drafter.draft_tree_rows(rows, steps, edits)
            return DraftRows(tree.tokens_BN, tree.parents_BN)
        drafts_BK = self.drafter.draft_rows(rows, steps, edits)
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        above_N = torch.arange(-1, steps, device=tokens_BN.device)
        return DraftRows(tokens_BN, above_N.expand_as(tokens_BN).contiguous())
