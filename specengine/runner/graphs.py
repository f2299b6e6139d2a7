"""CUDA graphs of the decode forward: fixed buffers, one memory pool, captured large to small."""

from __future__ import annotations

import bisect
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.columns import columns_size, joined_columns, parted_columns
from specengine.core.interfaces import LogitsOutput
from specengine.runner.graph_counters import count_fallback
from specengine.runner.graph_guard import GraphGuard

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)
T = TypeVar("T")

_one_at_a_time = Lock()  # engines in threads of one process share the stream


@dataclass(frozen=True)
class CapturedDecode:
    """One captured batch size. `batch` views the fixed buffers, which must stay where they are."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    output: LogitsOutput  # rows of padding included
    guard: GraphGuard | None


class _Collection:
    """Python's garbage collector, which stands still as long as anybody says so."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stopped = 0  # how often
        self._was_enabled = False

    def stop(self) -> None:
        with self._lock:
            if not self._stopped:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._stopped += 1

    def go_on(self) -> None:
        with self._lock:
            self._stopped -= 1
            if not self._stopped and self._was_enabled:
                gc.enable()


_collection = _Collection()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a capture may free another engine's graphs or memory, which
    invalidates the capture. None comes before it either: that takes as long as several captures,
    and rounds wait for those that come late."""
    _collection.stop()
    try:
        yield
    finally:
        _collection.go_on()


def capture(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `run` launches, and what it returned: tensors that every replay writes. It
    runs once before, which compiles kernels and creates library handles outside the capture."""
    with _one_at_a_time:
        _warm_up([run])
        return _record(run, pool)


def capture_parts(parts: Sequence[Callable[[], object]], pool: Any) -> list[torch.cuda.CUDAGraph]:
    """Likewise of each part. What one leaves for the next stays where it is: hold on to it."""
    with _one_at_a_time:
        _warm_up(parts)
        return [_record(part, pool)[0] for part in parts]


def _warm_up(parts: Sequence[Callable[[], object]]) -> None:
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for part in parts:
            part()
    torch.cuda.current_stream().wait_stream(stream)


def _record(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    graph = torch.cuda.CUDAGraph()
    with (
        torch.inference_mode(),
        torch.cuda.graph(
            graph,
            pool=pool,
            stream=_side_stream(torch.cuda.current_device()),
            capture_error_mode="thread_local",
        ),
    ):
        output = run()
    return graph, output


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """What graphs are captured on. cuBLAS keeps a workspace of 32 MiB for each stream that it has
    ever run on: with a stream a capture that was a GiB."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DecodeGraphRunner:
    """Replays decode steps.

    Inputs of a step cross to the device in one copy of 3 x bs integers (token, request row,
    length); positions and KV slots are derived inside the graph. Padding rows use request row 0
    and so write to slot 0, which no request owns.
    """

    unguarded = ("captured",)

    def __init__(self, runner: ModelRunner, batch_sizes: list[int], padding: bool) -> None:
        self.runner = runner
        self.padding = padding
        self.batch_sizes = sorted(set(batch_sizes))
        self.captured: dict[int, CapturedDecode] = {}
        self.counters: Counter[str] = Counter()  # captures, replays, fallbacks by reason
        largest = self.batch_sizes[-1]
        self.fill = runner.attn_backend.get_cuda_graph_seq_len_fill_value()
        count = columns_size([largest] * 3)
        self.inputs = torch.zeros(count, dtype=torch.int64, device=runner.device)
        self.staging = torch.zeros(count, dtype=torch.int64).pin_memory()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self) -> None:
        start, memory = perf_counter(), self.runner.graph_memory
        used_before = memory.used
        backend = self.runner.attn_backend
        backend.init_cuda_graph_state(self.batch_sizes[-1], self.batch_sizes[-1])
        with without_garbage_collection():
            for bs in memory.affordable(self.batch_sizes[::-1], "decode graphs"):
                self.captured[bs] = self._capture_one(bs)
                self.counters["captures"] += 1
        self.batch_sizes = sorted(self.captured)
        logger.info(
            "captured %d decode graphs (batch sizes %s) in %.1f s, %.2f GiB",
            len(self.batch_sizes),
            self.batch_sizes,
            perf_counter() - start,
            (memory.used - used_before) / (1 << 30),
        )

    def rehearse(self, bs: int) -> None:
        """Run once what capturing this size records, under kernels.rehearsal."""
        batch = self._fixed_batch(bs)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        self._run(batch)

    def _capture_one(self, bs: int) -> CapturedDecode:
        batch = self._fixed_batch(bs)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        graph, output = capture(lambda: self._run(batch), self.runner.graph_memory.pool)
        return CapturedDecode(graph, batch, output, self.runner.guard_of(graphs=self, batch=batch))

    def _run(self, batch: ForwardBatch) -> LogitsOutput:
        table = batch.req_to_token_pool.req_to_token
        torch.sub(batch.seq_lens, 1, out=batch.positions)
        batch.out_cache_loc.copy_(table[batch.req_pool_indices, batch.positions])
        batch.captured.clear()
        hidden = self.runner.forward_decode(batch)
        logits = self.runner.model.head.logits(hidden)
        features = torch.cat(batch.captured, dim=-1) if batch.captured else None
        return LogitsOutput(logits, logits.argmax(dim=-1), hidden, features)

    def _fixed_batch(self, bs: int) -> ForwardBatch:
        sizes = [bs] * 3
        tokens, slots, seq_lens = parted_columns(self.inputs[: columns_size(sizes)], sizes)
        seq_lens.fill_(self.fill)
        device = self.runner.device
        ones = torch.ones(bs, dtype=torch.int64, device=device)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bs,
            num_tokens=bs,
            input_ids=tokens,
            positions=torch.zeros(bs, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(bs, dtype=torch.int64, device=device),
            req_pool_indices=slots,
            prefix_lens=torch.zeros(bs, dtype=torch.int64, device=device),
            extend_lens=ones,
            seq_lens=seq_lens,
            qo_indptr=torch.arange(bs + 1, dtype=torch.int64, device=device),
            prefix_lens_cpu=[0] * bs,
            extend_lens_cpu=[1] * bs,
            logits_rows=None,
            req_to_token_pool=self.runner.pools.req_to_token_pool,
            token_to_kv_pool=self.runner.pools.token_to_kv_pool,
            attn_backend=self.runner.attn_backend,
            attn_layers=self.runner.attn_layers,
            compiles=bs <= self.runner.compile_max_bs,
            capture_layers=self.runner.capture_layers,
        )

    def can_run(self, batch: ModelWorkerBatch) -> bool:
        """Whether a captured graph serves this batch. Where none does, counts the reason; modes
        that have graphs of their own are not its business."""
        if batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
            return False
        if not batch.forward_mode.is_decode():
            reason = f"mode {batch.forward_mode.name}"
        elif batch.batch_size > self.batch_sizes[-1]:
            reason = "batch larger than any captured"
        elif not self.padding and batch.batch_size not in self.captured:
            reason = "batch size not captured, padding off"
        else:
            return True
        count_fallback(self.counters, "decode", reason)
        return False

    def replay_prepare(self, batch: ModelWorkerBatch) -> CapturedDecode:
        """Put a batch into the fixed buffers of the smallest captured size that holds it."""
        bs = self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch.batch_size)]
        captured = self.captured[bs]
        pad = bs - batch.batch_size
        lens = [prefix + 1 for prefix in batch.prefix_lens]
        given = (
            [*batch.input_ids.tolist(), *[0] * pad],
            [*batch.req_pool_indices, *[0] * pad],
            [*lens, *[self.fill] * pad],
        )
        values = torch.from_numpy(joined_columns(given))
        # The copy of the step before may still read the pinned buffer.
        self.copied.synchronize()
        self.staging[: len(values)] = values
        self.inputs[: len(values)].copy_(self.staging[: len(values)], non_blocking=True)
        self.copied.record()
        captured.batch.prefix_lens_cpu = [*batch.prefix_lens, *[self.fill - 1] * pad]
        assert captured.batch.attn_plan is not None
        self.runner.attn_backend.init_forward_metadata_replay(
            captured.batch, captured.batch.attn_plan
        )
        return captured

    def replay(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run one step. The output views the graph's buffers: read it before the next replay."""
        captured = self.replay_prepare(batch)
        if captured.guard is not None:
            captured.guard.check()
        captured.graph.replay()
        self.counters["replays"] += 1
        return _first_rows(captured.output, batch.batch_size)


def _first_rows(output: LogitsOutput, count: int) -> LogitsOutput:
    argmax, hidden, features = output.argmax, output.hidden, output.features
    return LogitsOutput(
        logits=output.logits[:count],
        argmax=None if argmax is None else argmax[:count],
        hidden=None if hidden is None else hidden[:count],
        features=None if features is None else features[:count],
    )
