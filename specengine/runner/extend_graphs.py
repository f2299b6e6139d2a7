"""CUDA graphs of short prefills, whose time would otherwise be that of their launches."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.columns import columns_size, joined_columns, parted_columns
from specengine.core.interfaces import LogitsOutput
from specengine.core.transfer import pinned
from specengine.runner.graph_counters import MEMORY_SPENT, count_fallback
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.graphs import capture, without_garbage_collection
from specengine.runner.prefill_parts import is_launch_bound, joined, kept, parts_of
from specengine.runner.ragged_forms import CROWD, CROWD_WIDTH, MOST_PROMPTS

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """Of prefills that a graph serves: the most tokens, requests, and tokens of one request."""

    tokens: int
    requests: int
    width: int

    def holds(self, batch: ModelWorkerBatch) -> bool:
        return (
            0 <= self.tokens - batch.num_tokens <= self.width
            and batch.batch_size <= self.requests
            and max(batch.extend_lens) <= self.width
            and len(batch.logits_rows or ()) <= self.requests
        )

    @property
    def num_inputs(self) -> int:
        return columns_size(self.input_sizes)

    @property
    def input_sizes(self) -> list[int]:
        """Of the fields of Inputs; one more request takes the tokens that are missing."""
        requests = self.requests + 1
        return [self.tokens] * 3 + [requests, requests, requests + 1, self.requests]


# Prompts that come together are launched as often as one: 30 layers of a small model take 2 ms,
# and their launches 12. So even more of them run in parts. Attention has blocks for every request
# at its longest: hence the width. What is missing to a size must not be longer than that, either.
FEW = tuple(Shape(tokens, MOST_PROMPTS, tokens) for tokens in (16, 32, 64, 128, 256, 512))
MANY = tuple(Shape(tokens, CROWD, CROWD_WIDTH) for tokens in range(256, 2049, CROWD_WIDTH))
SHAPES = (*FEW, *MANY)


@dataclass(frozen=True)
class Inputs:
    """What a prefill takes from the host, views of one buffer that crosses in one copy. T tokens, R
    requests.

    Tokens past the real ones belong to request R, which has row 0 of the page table and so writes
    to slot 0, and sees itself alone: what attention left out would be whatever lay there, and a
    NaN in slot 0 survives. Requests past the real ones have no tokens.
    """

    tokens_T: Tensor
    requests_T: Tensor
    places_T: Tensor
    rows: Tensor  # [R + 1]
    seq_lens: Tensor  # [R + 1]
    qo_indptr: Tensor  # [R + 2]
    logits_rows: Tensor  # [R]

    @classmethod
    def of(cls, buffer: Tensor, shape: Shape) -> Inputs:
        return cls(*parted_columns(buffer[: shape.num_inputs], shape.input_sizes))

    @staticmethod
    def values(batch: ModelWorkerBatch, shape: Shape) -> NDArray[np.int64]:
        """For a batch that the shape holds, in the order of the fields."""
        requests, spare = shape.requests, shape.tokens - batch.num_tokens
        counts, prefixes = np.array((batch.extend_lens, batch.prefix_lens), dtype=np.int64)
        ends = counts.cumsum()
        places = (prefixes - ends + counts).repeat(counts) + np.arange(batch.num_tokens)
        seq_lens = _filled(prefixes + counts, requests + 1, 0)
        seq_lens[requests] = spare
        starts = _filled(ends - counts, requests + 2, ends[-1])
        starts[-1] = shape.tokens
        return joined_columns(
            (
                _filled(batch.input_ids.numpy(), shape.tokens, 0),
                _filled(np.arange(len(counts)).repeat(counts), shape.tokens, requests),
                np.concatenate((places, np.arange(spare))),
                _filled(batch.req_pool_indices, requests + 1, 0),
                seq_lens,
                starts,
                _filled(batch.logits_rows or (), requests, 0),
            )
        )


def _filled(values: ArrayLike, size: int, filling: int) -> NDArray[np.int64]:
    out = np.full(size, filling)
    found = np.asarray(values, dtype=np.int64)
    out[: len(found)] = found
    return out


@dataclass(frozen=True)
class CapturedExtend:
    """One captured shape. The graph writes to tensors of `batch`, which must live as long."""

    batch: ForwardBatch
    graph: torch.cuda.CUDAGraph
    output: LogitsOutput  # rows of padding included
    guard: GraphGuard | None


class ExtendGraphRunner:
    """Replays EXTEND forwards of short prompts; the rest runs eagerly."""

    unguarded = ("captured",)

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        context = self.table.shape[1]
        self.shapes = [shape for shape in SHAPES if shape.width <= context]
        self.captured: dict[Shape, CapturedExtend] = {}
        self.counters: Counter[str] = Counter()
        length = max((shape.num_inputs for shape in self.shapes), default=0)
        self.buffer = torch.zeros(length, dtype=torch.int64, device=runner.device)
        self.takes_parts = is_launch_bound(runner.model)
        self.is_cut = False  # whether there was no memory for some

    @property
    def table(self) -> Tensor:
        return self.runner.pools.req_to_token_pool.req_to_token

    def capture(self) -> None:
        start, memory = perf_counter(), self.runner.graph_memory
        used_before = memory.used
        wanted = sorted(self.shapes, key=lambda shape: shape.tokens, reverse=True)
        with without_garbage_collection():
            for shape in memory.affordable(wanted, "prefill graphs"):
                self.captured[shape] = self._capture_one(shape)
                self.counters["captures"] += 1
        self.is_cut = len(self.captured) < len(wanted)
        self.shapes = [shape for shape in self.shapes if shape in self.captured]
        logger.info(
            "captured %d prefill graphs of up to %d tokens in %.1f s, %.2f GiB",
            len(self.shapes),
            self._most[0],
            perf_counter() - start,
            (memory.used - used_before) / (1 << 30),
        )

    @property
    def telling_shapes(self) -> list[Shape]:
        """Those that the others have all their kernels from."""
        many = [shape for shape in self.shapes if shape in MANY]
        return [shape for shape in self.shapes if shape not in many[1:-1]]

    def rehearse(self, shape: Shape) -> None:
        """Run once what capturing this shape records, under kernels.rehearsal."""
        inputs = Inputs.of(self.buffer, shape)
        batch = self._fixed_batch(inputs, shape)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        self._run(batch, inputs)

    def _capture_one(self, shape: Shape) -> CapturedExtend:
        inputs = Inputs.of(self.buffer, shape)
        batch = self._fixed_batch(inputs, shape)
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        pool = self.runner.graph_memory.pool
        graph, output = capture(lambda: self._run(batch, inputs), pool)
        guard = self.runner.guard_of(graphs=self, batch=batch)
        return CapturedExtend(batch, graph, output, guard)

    def _run(self, batch: ForwardBatch, inputs: Inputs) -> LogitsOutput:
        rows = inputs.rows[inputs.requests_T]
        batch.out_cache_loc.copy_(self.table[rows, inputs.places_T])
        batch.captured.clear()
        hidden = self.runner.forward_extend(batch)
        logits = self.runner.model.head.logits(hidden[inputs.logits_rows])
        features = torch.cat(batch.captured, dim=-1) if batch.captured else None
        return LogitsOutput(logits, None, hidden, features)

    def _fixed_batch(self, inputs: Inputs, shape: Shape) -> ForwardBatch:
        lens, requests = torch.zeros_like(inputs.seq_lens), len(inputs.rows)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=requests,
            num_tokens=shape.tokens,
            input_ids=inputs.tokens_T,
            positions=inputs.places_T,
            out_cache_loc=torch.zeros_like(inputs.places_T),
            req_pool_indices=inputs.rows,
            prefix_lens=lens,
            extend_lens=lens,
            seq_lens=inputs.seq_lens,
            qo_indptr=inputs.qo_indptr,
            prefix_lens_cpu=[0] * requests,
            extend_lens_cpu=[shape.width] * requests,  # the most that one of them may have
            logits_rows=inputs.logits_rows,
            req_to_token_pool=self.runner.pools.req_to_token_pool,
            token_to_kv_pool=self.runner.pools.token_to_kv_pool,
            attn_backend=self.runner.attn_backend,
            attn_layers=self.runner.attn_layers,
            capture_layers=self.runner.capture_layers,
        )

    def run(self, batch: ModelWorkerBatch) -> LogitsOutput | None:
        """Run a prefill that the graphs serve, whole or in parts; None, and nothing done, for any
        other. The output may view the graphs' buffers: read it before the next call."""
        parts = self.parts_of(batch)
        if len(parts) == 1:
            return self.replay(*parts[0])
        outputs = [kept(self.replay(shape, part)) for shape, part in parts]
        return joined(outputs) if outputs else None

    def parts_of(self, batch: ModelWorkerBatch) -> list[tuple[Shape, ModelWorkerBatch]]:
        """What to replay. Nothing where no graphs serve a prefill; counts the reason."""
        if batch.forward_mode is not ForwardMode.EXTEND or batch.num_tokens == 0:
            return []
        if batch.logits_rows is None or len(batch.logits_rows) > batch.batch_size:
            count_fallback(self.counters, "prefill", "logits of every token")
            return []
        shape = self._shape_of(batch)
        if shape is not None:
            return [(shape, batch)]
        if self.takes_parts and max(batch.extend_lens) <= CROWD_WIDTH:
            parts = [(self._shape_of(one), one) for one in parts_of(batch, *self._most)]
            found = [(shape, part) for shape, part in parts if shape is not None]
            if len(found) == len(parts):
                return found
        count_fallback(self.counters, "prefill", self._why_none(batch))
        return []

    def _shape_of(self, batch: ModelWorkerBatch) -> Shape | None:
        """The smallest that holds it."""
        return next((shape for shape in self.shapes if shape.holds(batch)), None)

    @property
    def _most(self) -> tuple[int, int]:
        """Tokens and requests of any shape."""
        tokens = max((shape.tokens for shape in self.shapes), default=0)
        return tokens, max((shape.requests for shape in self.shapes), default=0)

    def _why_none(self, batch: ModelWorkerBatch) -> str:
        tokens, requests = self._most
        if batch.num_tokens > tokens:
            return "more tokens than any captured"
        if batch.batch_size > requests:
            return "more requests than captured"
        return MEMORY_SPENT if self.is_cut else "a longer prompt than any captured"

    def replay(self, shape: Shape, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run one prefill that the shape holds. The output views the graph's buffers: read it
        before the next replay."""
        values = torch.from_numpy(Inputs.values(batch, shape))
        self.buffer[: len(values)].copy_(pinned(values, self.runner.device), non_blocking=True)
        captured = self.captured[shape]
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
