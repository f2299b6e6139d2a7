"""CUDA graphs of decode steps, one a batch size, captured at start from large to small."""

from __future__ import annotations

from functools import partial

import torch

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.columns import columns_size, joined_columns, parted_columns
from specengine.core.interfaces import LogitsOutput
from specengine.core.platform import Graph, platform_of
from specengine.runner.context import ForwardContext, hidden_of, joined_features
from specengine.runner.forward_graphs.keys import at_least, why_no_size
from specengine.runner.forward_graphs.outputs import FixedForward, first_rows
from specengine.runner.graph_cache import GraphCache
from specengine.runner.graph_guard import GraphGuard

_PADDING = 1  # seq_len of padding rows: they read slot 0 alone, and divide by something


class DecodeGraphs:
    """Replays decode steps.

    The inputs of a step cross to the device in one copy of 3 x B integers (token, request row,
    length); positions and KV slots are derived inside the graph. Padding rows use request row 0
    and so write to slot 0, which no request owns.
    """

    def __init__(self, context: ForwardContext, batch_sizes: list[int], padding: bool) -> None:
        self.context, self.platform = context, platform_of(context.device)
        self.padding = padding
        self.batch_sizes = sorted(set(batch_sizes))
        self.cache = GraphCache[int, FixedForward]("decode", context.graph_memory, self._guard_of)
        self.counters = self.cache.counters
        count = columns_size([self.batch_sizes[-1]] * 3)
        self.inputs = torch.zeros(count, dtype=torch.int64, device=context.device)
        self.staging = self.platform.pinned(torch.zeros(count, dtype=torch.int64))
        self.copied = self.platform.new_event()

    def _guard_of(self, buffers: FixedForward) -> GraphGuard | None:
        return self.context.guard_of(graphs=self, batch=buffers.batch)

    def capture(self) -> None:
        """All sizes, as far as the memory for graphs reaches."""
        sizes = self.batch_sizes[::-1]
        self.batch_sizes = sorted(
            self.cache.capture_at_start(sizes, lambda size: [size], self._make)
        )

    def precompile(self, batch_size: int) -> None:
        """Run once what a capture of this size records, under kernels.precompile."""
        self._run(self._planned_batch(batch_size))

    def _make(self, batch_size: int) -> tuple[Graph, FixedForward]:
        batch = self._planned_batch(batch_size)
        graph, output = self.cache.record(partial(self._run, batch))
        return graph, FixedForward(batch, output)

    def _run(self, batch: ForwardBatch) -> LogitsOutput:
        torch.sub(batch.seq_lens, 1, out=batch.positions)
        hidden = hidden_of(self.context, batch, batch.req_pool_indices, batch.positions)
        logits = self.context.model.head.logits(hidden)
        return LogitsOutput(logits, logits.argmax(dim=-1), hidden, joined_features(batch))

    def _planned_batch(self, bs: int) -> ForwardBatch:
        sizes, device = [bs] * 3, self.context.device
        tokens, rows, seq_lens = parted_columns(self.inputs[: columns_size(sizes)], sizes)
        seq_lens.fill_(_PADDING)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bs,
            num_tokens=bs,
            input_ids=tokens,
            positions=torch.zeros(bs, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(bs, dtype=torch.int64, device=device),
            req_pool_indices=rows,
            prefix_lens=torch.zeros(bs, dtype=torch.int64, device=device),
            extend_lens=torch.ones(bs, dtype=torch.int64, device=device),
            seq_lens=seq_lens,
            qo_indptr=torch.arange(bs + 1, dtype=torch.int64, device=device),
            prefix_lens_cpu=[0] * bs,
            extend_lens_cpu=[1] * bs,
            logits_rows=None,
            compiles=bs <= self.context.compile_max_bs,
            **self.context.batch_fields,
        )
        self.context.attn_backend.init_forward_metadata_capture(batch)
        return batch

    def can_run(self, batch: ModelWorkerBatch) -> bool:
        """Whether a captured graph serves this batch. Where none does, counts the reason; modes
        that have graphs of their own are not counted here."""
        mode = batch.forward_mode
        if mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
            return False
        reason: str | None = f"mode {mode.name}"
        if mode.is_decode():
            reason = why_no_size(self.batch_sizes, self.padding, batch.batch_size)
        if reason is not None:
            self.cache.count_fallback(reason)
        return reason is None

    def replay(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run one step in the smallest captured size that holds it. The output views the graph's
        buffers: read it before the next replay."""
        size = at_least(self.batch_sizes, batch.batch_size)
        captured = self.cache.captured[size]
        self._fill(captured.buffers.batch, batch)
        self.cache.replay(captured)
        return first_rows(captured.buffers.output, batch.batch_size, batch.batch_size)

    def _fill(self, fixed: ForwardBatch, batch: ModelWorkerBatch) -> None:
        pad = fixed.batch_size - batch.batch_size
        lens = [prefix + 1 for prefix in batch.prefix_lens]
        columns = (
            [*batch.input_ids.tolist(), *[0] * pad],
            [*batch.req_pool_indices, *[0] * pad],
            [*lens, *[_PADDING] * pad],
        )
        values = torch.from_numpy(joined_columns(columns))
        self.copied.synchronize()  # the copy of the step before may still read the pinned buffer
        self.staging[: len(values)] = values
        self.inputs[: len(values)].copy_(self.staging[: len(values)], non_blocking=True)
        self.copied.record()
        fixed.prefix_lens_cpu = [*batch.prefix_lens, *[_PADDING - 1] * pad]
        assert fixed.attn_plan is not None
        self.context.attn_backend.init_forward_metadata_replay(fixed, fixed.attn_plan)
