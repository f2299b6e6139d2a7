"""A round's whole draft in one CUDA graph, for rounds whose tokens the host has a part in."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from specengine.core.batch import RowBatch, ScheduleBatch
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, RowDrafter, TreeRowDrafter
from specengine.runner.graph_counters import count_fallback
from specengine.runner.graphs import capture, without_garbage_collection
from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftRows:
    """What a loop leaves: N nodes a request, the root first."""

    tokens_BN: Tensor
    parents_BN: Tensor


@dataclass(frozen=True)
class CapturedLoop:
    graph: torch.cuda.CUDAGraph
    inputs_3B: Tensor  # rows of the page table, lengths, roots; row 0 pads
    drafted: DraftRows


def draws_trees(drafter: object) -> bool:
    """Whether a drafter grows trees on the device alone."""
    return isinstance(drafter, TreeRowDrafter) and drafter.tree_row_steps is not None


def draws_chains(drafter: object) -> bool:
    """Whether a drafter drafts chains on the device alone."""
    return isinstance(drafter, RowDrafter) and drafter.row_steps is not None


class DraftLoops:
    """Draft loops of a drafter that needs nothing from the host, captured when first needed."""

    def __init__(
        self,
        drafter: RowDrafter,
        runner: ModelRunner,
        batch_sizes: tuple[int, ...],
        padding: bool,
        counters: Counter[str],
    ) -> None:
        """batch_sizes: ascending. padding: let a larger graph serve a batch."""
        self.drafter = drafter
        self.runner = runner
        self.batch_sizes = batch_sizes
        self.padding = padding
        self.counters = counters
        self.draws_trees = draws_trees(drafter)
        self.captured: dict[tuple[int, int], CapturedLoop] = {}  # by batch size and steps

    def draft(self, batch: ScheduleBatch, levels: list[int]) -> DraftProposal | None:
        """levels: how deep each request may draft, the largest at least 1. Of trees, all have as
        many nodes, whatever a request may still emit. None where no graph serves the batch; counts
        the reason."""
        steps = max(levels)
        reason = self._objection(batch, steps)
        if reason is not None:
            count_fallback(self.counters, "draft loop", reason)
            return None
        size = self._size(batch)
        loop = self.captured.get((size, steps)) or self._capture(size, steps)
        loop.inputs_3B.copy_(self._inputs(batch.reqs, levels, size), non_blocking=True)
        loop.graph.replay()
        self.counters["replays"] += 1
        return self._proposal(loop.drafted, levels)

    def _objection(self, batch: ScheduleBatch, steps: int) -> str | None:
        if batch.batch_size > self.batch_sizes[-1]:
            return "batch larger than any captured"
        if not self.padding and batch.batch_size not in self.batch_sizes:
            return "batch size not captured, padding off"
        if batch.sampling.edits is not None:
            return "edited logits"
        if self.runner.graph_memory.is_spent and (self._size(batch), steps) not in self.captured:
            return "memory for graphs is spent"
        if not all(req.reserved_len >= req.kv_len + self._slots(steps) for req in batch.reqs):
            return "memory nearly full"
        return None

    def _size(self, batch: ScheduleBatch) -> int:
        return self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch.batch_size)]

    def _slots(self, steps: int) -> int:
        """That drafts and their verification take up."""
        if isinstance(self.drafter, TreeRowDrafter) and self.draws_trees:
            return max(self.drafter.num_tree_nodes(steps), self.drafter.row_slots)
        return steps + 1

    def _inputs(self, reqs: list[Req], levels: list[int], size: int) -> Tensor:
        """int64 [3, size]. Requests that draft nothing pad."""
        pad = [0] * (size - len(reqs))
        rows = [req.req_pool_idx if level else 0 for req, level in zip(reqs, levels, strict=True)]
        lens, roots = [req.kv_len for req in reqs], [req.last_token for req in reqs]
        values = torch.tensor([rows + pad, lens + pad, roots + pad])
        return values.pin_memory() if self.runner.device.type == "cuda" else values

    def _proposal(self, drafted: DraftRows, levels: list[int]) -> DraftProposal:
        tokens_BN, parents_BN = drafted.tokens_BN[: len(levels)], drafted.parents_BN[: len(levels)]
        if self.draws_trees:
            num_nodes = [tokens_BN.shape[1]] * len(levels)
        else:
            num_nodes = [1 + level for level in levels]
        return DraftProposal(tokens_BN, parents_BN, num_nodes, is_chain=not self.draws_trees)

    @torch.inference_mode()
    def _capture(self, size: int, steps: int) -> CapturedLoop:
        start = perf_counter()
        inputs_3B = torch.zeros(3, size, dtype=torch.int64, device=self.runner.device)
        run = partial(self._run, RowBatch(*inputs_3B), steps)
        memory = self.runner.graph_memory
        with without_garbage_collection(), memory.measured():
            graph, drafted = capture(run, memory.pool)
        self.counters["captures"] += 1
        seconds = perf_counter() - start
        logger.info("captured a draft loop of %d x %d in %.2f s", size, steps, seconds)
        self.captured[size, steps] = CapturedLoop(graph, inputs_3B, drafted)
        return self.captured[size, steps]

    def _run(self, rows: RowBatch, steps: int) -> DraftRows:
        if isinstance(self.drafter, TreeRowDrafter) and self.draws_trees:
            tree = self.drafter.draft_tree_rows(rows, steps)
            return DraftRows(tree.tokens_BN, tree.parents_BN)
        drafts_BK = self.drafter.draft_rows(rows, steps)
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        above_N = torch.arange(-1, steps, device=tokens_BN.device)
        return DraftRows(tokens_BN, above_N.expand_as(tokens_BN).contiguous())
