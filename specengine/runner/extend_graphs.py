"""CUDA graphs of short prefills, whose time would otherwise be that of their launches."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.runner.graph_counters import count_fallback
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.graphs import capture, without_garbage_collection

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SIZES = (16, 32, 64, 128, 256, 512)  # tokens
MAX_REQUESTS = 8


@dataclass(frozen=True)
class Inputs:
    """What a prefill takes from the host, views of one buffer that crosses in one copy.

    Tokens past the real ones belong to request MAX_REQUESTS, which has row 0 of the page table and
    so writes to slot 0, and sees itself alone: what attention left out would be whatever lay there,
    and a NaN in slot 0 survives. Requests past the real ones have no tokens.
    """

    tokens_T: Tensor
    requests_T: Tensor
    places_T: Tensor
    rows: Tensor  # [MAX_REQUESTS + 1]
    seq_lens: Tensor  # [MAX_REQUESTS + 1]
    qo_indptr: Tensor  # [MAX_REQUESTS + 2]
    logits_rows: Tensor  # [MAX_REQUESTS]

    @classmethod
    def of(cls, buffer: Tensor, tokens: int) -> Inputs:
        requests = MAX_REQUESTS + 1
        sizes = [tokens] * 3 + [requests, requests, requests + 1, MAX_REQUESTS]
        return cls(*torch.split(buffer[: sum(sizes)], sizes))

    @staticmethod
    def values(batch: ModelWorkerBatch, tokens: int) -> list[int]:
        """For a batch of at most `tokens` tokens, in the order of the fields."""
        pad, absent = tokens - batch.num_tokens, MAX_REQUESTS - batch.batch_size
        requests: list[int] = []
        places: list[int] = []
        for i, (prefix, count) in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True)):
            requests += [i] * count
            places += range(prefix, prefix + count)
        ends = list(accumulate(batch.extend_lens))
        seq_lens = [p + e for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        rows = batch.logits_rows or []
        return [
            *batch.input_ids.tolist(),
            *[0] * pad,
            *requests,
            *[MAX_REQUESTS] * pad,
            *places,
            *range(pad),
            *batch.req_pool_indices,
            *[0] * (absent + 1),
            *seq_lens,
            *[0] * absent,
            pad,
            0,
            *ends,
            *[ends[-1]] * absent,
            tokens,
            *rows,
            *[0] * (MAX_REQUESTS - len(rows)),
        ]


@dataclass(frozen=True)
class CapturedExtend:
    """One captured size. The graph writes to tensors of `batch`, which must live as long."""

    batch: ForwardBatch
    graph: torch.cuda.CUDAGraph
    output: LogitsOutput  # rows of padding included
    guard: GraphGuard | None


class ExtendGraphRunner:
    """Replays EXTEND forwards of few tokens and few requests; the rest runs eagerly."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sizes = [size for size in SIZES if size <= self.table.shape[1]]
        self.captured: dict[int, CapturedExtend] = {}
        self.counters: Counter[str] = Counter()
        length = 3 * SIZES[-1] + 4 * MAX_REQUESTS + 4
        self.buffer = torch.zeros(length, dtype=torch.int64, device=runner.device)
        self.staging = torch.zeros(length, dtype=torch.int64).pin_memory()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def table(self) -> Tensor:
        return self.runner.pools.req_to_token_pool.req_to_token

    def capture(self) -> None:
        start, memory = perf_counter(), self.runner.graph_memory
        used_before, pool = memory.used, torch.cuda.graph_pool_handle()
        with without_garbage_collection(), memory.measured():
            for size in reversed(self.sizes):
                self.captured[size] = self._capture_one(size, pool)
                self.counters["captures"] += 1
        logger.info(
            "captured prefill graphs of %s tokens in %.1f s, %.2f GiB",
            self.sizes,
            perf_counter() - start,
            (memory.used - used_before) / (1 << 30),
        )

    def rehearse(self, size: int) -> None:
        """Run once what capturing this size records, under kernels.rehearsal."""
        inputs = Inputs.of(self.buffer, size)
        batch = self._fixed_batch(inputs, size)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        self._run(batch, inputs)

    def _capture_one(self, size: int, pool: Any) -> CapturedExtend:
        inputs = Inputs.of(self.buffer, size)
        batch = self._fixed_batch(inputs, size)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        graph, output = capture(lambda: self._run(batch, inputs), pool)
        return CapturedExtend(batch, graph, output, self.runner.guard_of(batch))

    def _run(self, batch: ForwardBatch, inputs: Inputs) -> LogitsOutput:
        rows = inputs.rows[inputs.requests_T]
        batch.out_cache_loc.copy_(self.table[rows, inputs.places_T])
        batch.captured.clear()
        hidden = self.runner.forward_extend(batch)
        logits = self.runner.model.compute_logits(hidden[inputs.logits_rows])
        features = torch.cat(batch.captured, dim=-1) if batch.captured else None
        return LogitsOutput(logits, None, hidden, features)

    def _fixed_batch(self, inputs: Inputs, size: int) -> ForwardBatch:
        lens, requests = torch.zeros_like(inputs.seq_lens), len(inputs.rows)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=requests,
            num_tokens=size,
            input_ids=inputs.tokens_T,
            positions=inputs.places_T,
            out_cache_loc=torch.zeros_like(inputs.places_T),
            req_pool_indices=inputs.rows,
            prefix_lens=lens,
            extend_lens=lens,
            seq_lens=inputs.seq_lens,
            qo_indptr=inputs.qo_indptr,
            prefix_lens_cpu=[0] * requests,
            extend_lens_cpu=[size] * requests,  # the most that one of them may have
            logits_rows=inputs.logits_rows,
            req_to_token_pool=self.runner.pools.req_to_token_pool,
            token_to_kv_pool=self.runner.pools.token_to_kv_pool,
            attn_backend=self.runner.attn_backend,
            attn_layers=self.runner.attn_layers,
            capture_layers=self.runner.capture_layers,
        )

    def can_run(self, batch: ModelWorkerBatch) -> bool:
        """Whether a captured graph serves this prefill. Where none does, counts the reason."""
        if batch.forward_mode is not ForwardMode.EXTEND or batch.num_tokens == 0:
            return False
        if batch.num_tokens > self.sizes[-1]:
            reason = "more tokens than any captured"
        elif batch.batch_size > MAX_REQUESTS:
            reason = "more requests than captured"
        elif batch.logits_rows is None or len(batch.logits_rows) > MAX_REQUESTS:
            reason = "logits of every token"
        else:
            return True
        count_fallback(self.counters, "prefill", reason)
        return False

    def replay(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run one prefill. The output views the graph's buffers: read it before the next replay."""
        size = self.sizes[bisect.bisect_left(self.sizes, batch.num_tokens)]
        values = torch.tensor(Inputs.values(batch, size), dtype=torch.int64)
        # The copy of the prefill before may still read the pinned buffer.
        self.copied.synchronize()
        self.staging[: len(values)] = values
        self.buffer[: len(values)].copy_(self.staging[: len(values)], non_blocking=True)
        self.copied.record()
        captured = self.captured[size]
        if captured.guard is not None:
            captured.guard.check()
        captured.graph.replay()
        self.counters["replays"] += 1
        output, count = captured.output, batch.num_tokens
        assert output.hidden is not None
        assert batch.logits_rows is not None
        return LogitsOutput(
            logits=output.logits[: len(batch.logits_rows)],
            hidden=output.hidden[:count],
            features=None if output.features is None else output.features[:count],
        )
