"""CUDA graphs of forwards over a few tokens of each request: verification, ragged or under trees,
and the forwards of drafters. Each is captured when it is first needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.platform import Graph
from specengine.core.transfer import pinned, sent
from specengine.core.tree import Tree
from specengine.runner.context import ForwardContext, hidden_of, joined_features
from specengine.runner.fallbacks import MEMORY_SPENT
from specengine.runner.forward_graphs.inputs import (
    ForwardInputs,
    num_forward_inputs,
    pack_forward,
)
from specengine.runner.forward_graphs.keys import ForwardKey, GraphSizes
from specengine.runner.forward_graphs.outputs import first_rows
from specengine.runner.forward_graphs.splits import is_launch_bound, split
from specengine.runner.graph_cache import Captured, GraphCache
from specengine.runner.graph_guard import GraphGuard


@dataclass(frozen=True)
class ForwardBuffers:
    """The fixed tensors of one key."""

    buffer: Tensor  # what `inputs` views
    inputs: ForwardInputs
    batch: ForwardBatch
    output: LogitsOutput  # rows of padding included

    def last_rows(self, batch_size: int) -> Tensor:
        """int64 [B], the row of the last token of each request that was loaded."""
        return self.inputs.qo_indptr[1 : batch_size + 1] - 1

    def fill(
        self,
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None,
        last_B: Tensor | None,
    ) -> None:
        """Copy what lies on the device; `RaggedGraphs.load` copied the rest."""
        if tokens.device == self.buffer.device:
            self.inputs.token_T[: batch.num_tokens].copy_(tokens)
        if last_B is not None:
            self.inputs.token_T.index_copy_(0, self.last_rows(batch.batch_size), last_B)
        if batch.tree is not None:
            self._fill_tree(batch.tree, batch.num_tokens)
        if features is not None:
            assert self.batch.features is not None
            self.batch.features[: batch.num_tokens].copy_(features)

    def set_host_lengths(self, values: Tensor, key: ForwardKey) -> None:
        """For a backend that plans on the host."""
        inputs = ForwardInputs.of(values, key)
        self.batch.prefix_lens_cpu = inputs.prefix_lens_N.tolist()
        self.batch.extend_lens_cpu = inputs.extend_lens_N.tolist()

    def _fill_tree(self, tree: Tree, num_tokens: int) -> None:
        """Mask rows and columns past a request's nodes keep old values: no kernel reads them."""
        assert self.batch.tree is not None
        if tree.depths_T.device == self.buffer.device:
            self.inputs.depth_T[:num_tokens].copy_(tree.depths_T)
        requests, nodes, seen = tree.mask_BNN.shape
        mask = self.batch.tree.mask_BNN[:requests, :nodes, :seen]
        mask.copy_(sent(tree.mask_BNN, mask.device))


class RaggedGraphs:
    """Replays forwards of the modes it was made for."""

    def __init__(
        self,
        context: ForwardContext,
        kind: str,
        modes: frozenset[ForwardMode],
        sizes: GraphSizes,
        counters: Counter[str],
    ) -> None:
        """kind: the name in /metrics and the log. counters: shared by all graphs of the kind."""
        self.context = context
        self.modes = modes
        self.sizes = sizes
        self.cache = GraphCache[ForwardKey, ForwardBuffers](
            kind, context.graph_memory, self._guard_of, counters
        )
        self.splits = is_launch_bound(context.model, context.graph_memory.communicator)

    def _guard_of(self, buffers: ForwardBuffers) -> GraphGuard | None:
        return self.context.guard_of(graphs=self, batch=buffers.batch)

    def key_of(self, batch: ModelWorkerBatch) -> ForwardKey | None:
        """The key of the graph that serves this batch. Where none does, counts the reason; other
        modes are not counted."""
        if batch.forward_mode not in self.modes or batch.num_tokens == 0:
            return None
        key = self.sizes.key_of(batch)
        if isinstance(key, ForwardKey):
            if self.cache.has_memory_for(key):
                return key
            key = MEMORY_SPENT
        self.cache.count_fallback(key)
        return None

    def parts_of(self, batch: ModelWorkerBatch) -> list[tuple[ForwardKey, ModelWorkerBatch]]:
        """The batch with its key; prompts that no graph holds at once in parts, where launches take
        longer than the layers. Empty where no graph serves it."""
        parts = [batch]
        if batch.forward_mode in self.modes and self.splits:
            limits = self.sizes.split_limits(batch)
            parts = parts if limits is None else split(batch, *limits)
        found = [(key, part) for part in parts if (key := self.key_of(part)) is not None]
        return found if len(found) == len(parts) else []

    @torch.inference_mode()
    def replay(
        self,
        key: ForwardKey,
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> tuple[LogitsOutput, ForwardBuffers]:
        """Run a batch of this key. The output views the graph's buffers: read it before the next
        replay. tokens: int64 [T], anywhere; features: [T, F], what a drafter's model takes in
        beside tokens; last_B: int64 [B] on the device, in place of each request's last token."""
        captured = self.prepare(key, features)
        self.load(captured, key, batch, tokens)
        return self.launch(captured, batch, tokens, features, last_B), captured.buffers

    @torch.inference_mode()
    def prepare(self, key: ForwardKey, features: Tensor | None) -> Captured[ForwardBuffers]:
        """Capture the key at its first use. features: [any, F], for its width and dtype."""
        return self.cache.get(key, partial(self._make, features))

    def precompile(self, key: ForwardKey, features: Tensor | None) -> None:
        """Run once what a capture of this key records, under kernels.precompile."""
        _, inputs, batch = self._planned_batch(features, key)
        self._run(key, inputs, batch)

    def load(
        self,
        captured: Captured[ForwardBuffers],
        key: ForwardKey,
        batch: ModelWorkerBatch,
        tokens: Tensor,
    ) -> None:
        """Copy what the host knows of a batch into the buffers, and plan it."""
        buffers, backend = captured.buffers, self.context.attn_backend
        values = torch.from_numpy(pack_forward(batch, tokens, key))
        if backend.limits.plans_on_host:
            buffers.set_host_lengths(values, key)
        buffers.buffer.copy_(pinned(values, self.context.device), non_blocking=True)
        assert buffers.batch.attn_plan is not None
        backend.init_forward_metadata_replay(buffers.batch, buffers.batch.attn_plan)

    @torch.inference_mode()
    def launch(
        self,
        captured: Captured[ForwardBuffers],
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        """Run a batch that was loaded, after copying the parts of it that lie on the device."""
        captured.buffers.fill(batch, tokens, features, last_B)
        self.cache.replay(captured)
        count, rows = batch.num_tokens, batch.logits_rows
        return first_rows(captured.buffers.output, count, count if rows is None else len(rows))

    def _make(self, features: Tensor | None, key: ForwardKey) -> tuple[Graph, ForwardBuffers]:
        buffer, inputs, batch = self._planned_batch(features, key)
        graph, output = self.cache.record(partial(self._run, key, inputs, batch))
        return graph, ForwardBuffers(buffer, inputs, batch, output)

    def _planned_batch(
        self, features: Tensor | None, key: ForwardKey
    ) -> tuple[Tensor, ForwardInputs, ForwardBatch]:
        """A batch of padding requests alone, which overwrite no request's KV; and what its inputs
        view."""
        empty = ModelWorkerBatch(key.mode, torch.empty(0), [], [], [], [], None)
        device = self.context.device
        buffer = torch.zeros(num_forward_inputs(key), dtype=torch.int64, device=device)
        buffer.copy_(torch.from_numpy(pack_forward(empty, empty.input_ids, key)))
        inputs = ForwardInputs.of(buffer, key)
        batch = self._fixed_batch(key, inputs)
        if features is not None:
            batch.features = features.new_zeros(key.num_tokens, features.shape[1])
        self.context.attn_backend.init_forward_metadata_capture(batch)
        return buffer, inputs, batch

    def _run(self, key: ForwardKey, inputs: ForwardInputs, batch: ForwardBatch) -> LogitsOutput:
        if batch.tree is not None:
            torch.add(inputs.base_T, inputs.depth_T, out=batch.positions)
        hidden = hidden_of(self.context, batch, inputs.row_T, inputs.place_T)
        rows = hidden[inputs.logits_rows_N] if key.logits == "chosen" else hidden
        logits = hidden[:0] if key.logits == "none" else self.context.model.head.logits(rows)
        return LogitsOutput(logits, hidden=hidden, features=joined_features(batch))

    def _fixed_batch(self, key: ForwardKey, inputs: ForwardInputs) -> ForwardBatch:
        tree, positions = None, inputs.place_T
        if key.num_past is not None:
            shape = key.num_requests, key.width, key.num_past + key.width
            mask = torch.zeros(shape, dtype=torch.bool, device=self.context.device)
            mask[:, :, key.num_past :] = torch.eye(key.width, dtype=torch.bool)
            tree = Tree(inputs.depth_T, mask, key.num_past)
            positions = torch.zeros_like(inputs.place_T)
        return ForwardBatch(
            forward_mode=key.mode,
            batch_size=key.num_requests,
            num_tokens=key.num_tokens,
            input_ids=inputs.token_T,
            positions=positions,
            out_cache_loc=torch.zeros_like(inputs.place_T),
            req_pool_indices=inputs.rows_N,
            prefix_lens=inputs.prefix_lens_N,
            extend_lens=inputs.extend_lens_N,
            seq_lens=inputs.seq_lens_N,
            qo_indptr=inputs.qo_indptr,
            prefix_lens_cpu=inputs.prefix_lens_N.tolist(),
            extend_lens_cpu=inputs.extend_lens_N.tolist(),  # contains the widest that may come
            logits_rows=None,
            tree=tree,
            compiles=key.num_requests <= self.context.compile_max_bs,
            **self.context.batch_fields,
        )
