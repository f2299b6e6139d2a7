"""CUDA graphs of prefills that would otherwise take as long as their launches.

Those of short prompts are captured at start. A wide one, of long prompts, is captured while there
is no work (engine/background_capture.py), or for the second prefill of its size, which waits for
the capture: about as long as launches that the two would have saved. One that may have little
padding gains less: it is captured while there is no work alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.last_rows import MANY_ROWS
from specengine.core.model import DecoderModel
from specengine.core.parallel import Communicator, NoLink
from specengine.core.platform import Graph
from specengine.core.transfer import pinned
from specengine.runner import fallbacks
from specengine.runner.context import ForwardContext, hidden_of, joined_features
from specengine.runner.forward_graphs.inputs import (
    PrefillInputs,
    num_prefill_inputs,
    pack_prefill,
)
from specengine.runner.forward_graphs.keys import (
    LARGE_MAX_WIDTH,
    LARGE_PREFILLS,
    PREFILL_KEYS,
    WIDE_PREFILLS,
    PrefillKey,
)
from specengine.runner.forward_graphs.outputs import FixedForward, copy_of, first_rows, joined
from specengine.runner.forward_graphs.splits import (
    is_launch_bound,
    most_padding,
    split,
)
from specengine.runner.graph_cache import GraphCache
from specengine.runner.graph_guard import GraphGuard


def prefill_keys(
    model: DecoderModel, ranks: Communicator = NoLink.communicator
) -> list[PrefillKey]:
    """Those that serve a model, the smallest that fits a batch first. Wide ones do where they
    gain."""
    padding = most_padding([key.tokens for key in WIDE_PREFILLS], model, ranks)
    keys = [key for key in PREFILL_KEYS if not _is_wide(key) or key.tokens in padding]
    return [key._replace(padding=padding[key.tokens]) if _is_wide(key) else key for key in keys]


def _is_wide(key: PrefillKey) -> bool:
    return key._replace(padding=None) in WIDE_PREFILLS


class PrefillGraphs:
    """Replays EXTEND forwards of prompts; the rest runs eagerly."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context
        longest, memory = context.page_table.shape[1], context.graph_memory
        keys = prefill_keys(context.model, memory.communicator)
        self.keys = [key for key in keys if key.width <= longest]
        self.cache = GraphCache[PrefillKey, FixedForward]("prefill", memory, self._guard_of)
        self.counters = self.cache.counters
        count = max(map(num_prefill_inputs, self.keys), default=0)
        self.buffer = torch.zeros(count, dtype=torch.int64, device=context.device)
        self.splits = is_launch_bound(context.model, memory.communicator)
        self.lacks_memory = False  # for some of the keys
        self.wanted = Counter[PrefillKey]()  # prefills whose size had no graph

    def _guard_of(self, buffers: FixedForward) -> GraphGuard | None:
        return self.context.guard_of(graphs=self, batch=buffers.batch)

    def capture(self) -> None:
        """All keys but wide ones, as far as the memory for graphs reaches."""
        late = set(filter(_is_wide, self.keys))
        wanted = [key for key in self.keys if key not in late]
        wanted.sort(key=lambda key: key.tokens, reverse=True)
        done = self.cache.capture_at_start(wanted, lambda key: [key], self._make)
        self.lacks_memory = len(done) < len(wanted)
        self.keys = [key for key in self.keys if key in late.union(done)]

    def captures(self) -> Iterator[Callable[[], object]]:
        """What captures a wide key each, of those that have not been: the largest first, which
        serves the prompts of the others until they are there; then those with little padding."""
        wide = filter(_is_wide, self.keys)
        for key in sorted(wide, key=lambda key: (key.padding is not None, -key.tokens)):
            if key not in self.cache.captured:
                yield partial(self.cache.get, key, self._make, logging.DEBUG)

    @property
    def precompile_keys(self) -> list[PrefillKey]:
        """Keys whose kernels include those of all others. Wide ones have those of large ones, but
        for FlashAttention, which is compiled."""
        large = [key for key in self.keys if key in LARGE_PREFILLS]
        spare = {*large[1:-1], *filter(_is_wide, self.keys)}
        return [key for key in self.keys if key not in spare]

    def precompile(self, key: PrefillKey) -> None:
        """Run once what a capture of this key records, under kernels.precompile."""
        inputs = PrefillInputs.of(self.buffer, key)
        self._run(self._planned_batch(inputs, key), inputs)

    @torch.inference_mode()
    def _make(self, key: PrefillKey) -> tuple[Graph, FixedForward]:
        """Runs a prefill of padding alone: what the last replay has left in the buffer would be
        rows and positions of requests."""
        self.buffer.zero_()
        inputs = PrefillInputs.of(self.buffer, key)
        batch = self._planned_batch(inputs, key)
        graph, output = self.cache.record(partial(self._run, batch, inputs))
        return graph, FixedForward(batch, output)

    def _run(self, batch: ForwardBatch, inputs: PrefillInputs) -> LogitsOutput:
        rows_T = inputs.rows[inputs.requests_T]
        hidden = hidden_of(self.context, batch, rows_T, inputs.positions_T)
        is_left_out = len(hidden) < batch.num_tokens  # every row but those of logits_rows
        rows = hidden if is_left_out else hidden[inputs.logits_rows]
        logits = self.context.model.head.logits(rows)
        return LogitsOutput(logits, None, hidden, joined_features(batch))

    def _planned_batch(self, inputs: PrefillInputs, key: PrefillKey) -> ForwardBatch:
        lens, requests = torch.zeros_like(inputs.seq_lens), len(inputs.rows)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=requests,
            num_tokens=key.tokens,
            input_ids=inputs.tokens_T,
            positions=inputs.positions_T,
            out_cache_loc=torch.zeros_like(inputs.positions_T),
            req_pool_indices=inputs.rows,
            prefix_lens=lens,
            extend_lens=lens,
            seq_lens=inputs.seq_lens,
            qo_indptr=inputs.qo_indptr,
            prefix_lens_cpu=[0] * requests,
            extend_lens_cpu=[key.width] * requests,  # the most that one of them may have
            logits_rows=inputs.logits_rows,
            **self.context.batch_fields,
        )
        if not self.context.reads_hidden and key.tokens - key.requests > MANY_ROWS:
            batch.kept_rows = inputs.logits_rows
        self.context.attn_backend.init_forward_metadata_capture(batch)
        return batch

    def run(self, batch: ModelWorkerBatch) -> LogitsOutput | None:
        """Run a prefill that the graphs serve, whole or in parts; None, and nothing done, for any
        other. The output may view the graphs' buffers: read it before the next call."""
        parts = self.parts_of(batch)
        if len(parts) == 1:
            return self.replay(*parts[0])
        outputs = [copy_of(self.replay(key, part)) for key, part in parts]
        return joined(outputs) if outputs else None

    def parts_of(self, batch: ModelWorkerBatch) -> list[tuple[PrefillKey, ModelWorkerBatch]]:
        """What to replay. Empty where no graphs serve a prefill, whose reason is counted, and for
        other forward modes."""
        if batch.forward_mode is not ForwardMode.EXTEND or batch.num_tokens == 0:
            return []
        if batch.logits_rows is None or len(batch.logits_rows) > batch.batch_size:
            self.cache.count_fallback(fallbacks.EVERY_LOGIT)
            return []
        if fitting := [key for key in self.keys if key.fits(batch)]:
            if (key := self._key_of(fitting)) is not None:
                return [(key, batch)]
        elif self.splits and max(batch.extend_lens) <= LARGE_MAX_WIDTH:
            parts = split(batch, *self._most_of_a_part)
            found = [(key, part) for part in parts if (key := self._captured_key(part)) is not None]
            if len(found) == len(parts):
                return found
        self.cache.count_fallback(self._fallback_reason(batch))
        return []

    def _key_of(self, fitting: list[PrefillKey]) -> PrefillKey | None:
        """The smallest; while it is not captured, and not to be captured now, the smallest of those
        that are. All ranks of an engine run the same prefills, and capture for the same one."""
        best = fitting[0]
        if best not in self.cache.captured and best.padding is None:
            self.wanted[best] += 1
            if self.wanted[best] > 1 and self.cache.has_memory_for(best):
                return best
        return next((key for key in fitting if key in self.cache.captured), None)

    def _captured_key(self, batch: ModelWorkerBatch) -> PrefillKey | None:
        keys = (key for key in self.keys if key.fits(batch))
        return next((key for key in keys if key in self.cache.captured), None)

    @property
    def _most_of_a_part(self) -> tuple[int, int]:
        """Tokens and requests, which no wide key changes: it holds few requests."""
        keys = [key for key in self.keys if not _is_wide(key)]
        tokens = max((key.tokens for key in keys), default=0)
        return tokens, max((key.requests for key in keys), default=0)

    def _fallback_reason(self, batch: ModelWorkerBatch) -> str:
        if any(key.fits(batch) for key in self.keys):
            spent = self.cache.memory.is_spent
            return fallbacks.MEMORY_SPENT if spent else fallbacks.NOT_CAPTURED
        narrow = [key for key in self.keys if key.padding is not None]
        if not self.lacks_memory and any(one._replace(padding=None).fits(batch) for one in narrow):
            return fallbacks.MUCH_PADDING
        holding = [key for key in self.keys if key.requests >= batch.batch_size]
        if batch.num_tokens > max((key.tokens for key in holding or self.keys), default=0):
            return fallbacks.TOO_MANY_TOKENS
        if not holding:
            return fallbacks.TOO_MANY_REQUESTS
        return fallbacks.MEMORY_SPENT if self.lacks_memory else fallbacks.PROMPT_TOO_LONG

    def replay(self, key: PrefillKey, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run one prefill that fits the key. The output views the graph's buffers: read it before
        the next replay."""
        captured = self.cache.get(key, self._make)
        values = torch.from_numpy(pack_prefill(batch, key))
        self.buffer[: len(values)].copy_(pinned(values, self.context.device), non_blocking=True)
        self.cache.replay(captured)
        assert batch.logits_rows is not None
        return first_rows(captured.buffers.output, batch.num_tokens, len(batch.logits_rows))
