"""Plans forwards on a second stream while the current stream runs other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from specengine.core.batch import ForwardBatch, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.platform import Event, Platform, Stream
from specengine.core.transfer import sent
from specengine.runner.forward_graphs.ragged import ForwardBuffers, RaggedGraphs
from specengine.runner.graph_cache import Captured
from specengine.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class EagerAhead:
    """A planned forward without tokens and tree. Its plan carries an event for which the runner
    makes the current stream wait."""

    runner: ModelRunner
    batch: ForwardBatch

    @torch.inference_mode()
    def run(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """batch: the one that was planned, now with tokens and tree."""
        self.runner.check_plan(self.batch)
        self.batch.input_ids = sent(batch.input_ids, self.runner.device)
        if batch.tree is not None:
            assert self.batch.tree is not None
            self.batch.tree.mask_BNN.copy_(sent(batch.tree.mask_BNN, self.runner.device))
            self.batch.positions += sent(batch.tree.depths_T, self.runner.device)
        return self.runner.forward(self.batch, skip_attn_backend_init=True)

    def drop(self) -> None:
        """Called instead of run. No other stream uses its tensors: nothing to do."""


@dataclass(frozen=True)
class GraphAhead:
    """A forward planned in the buffers of a graph, which no other forward may use in between."""

    graphs: RaggedGraphs
    captured: Captured[ForwardBuffers]
    platform: Platform
    ready: Event | None

    def run(self, batch: ModelWorkerBatch) -> LogitsOutput:
        self.drop()
        tokens = sent(batch.input_ids, self.captured.buffers.buffer.device)
        return self.graphs.launch(self.captured, batch, tokens)

    def drop(self) -> None:
        """Called instead of run: makes the current stream wait until the buffers are written."""
        if self.ready is not None:
            self.platform.current_stream().wait_event(self.ready)


@dataclass
class PlanStream:
    """Three orders are kept, each by an event:

    - Work launched on the current stream so far precedes the plan: it writes the page table, and
      uses plans, buffers and memory that the plan reuses.
    - The plan precedes the forward that runs on it, or the next use of its buffers.
    - Pinned memory that the host wrote stays until it was copied; the backend ensures this.

    Without a GPU a forward is planned at once on the only stream.
    """

    runner: ModelRunner
    stream: Stream | None = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.runner.platform.new_stream()

    @torch.inference_mode()
    def begin(self, batch: ModelWorkerBatch) -> EagerAhead | GraphAhead | None:
        """batch: tokens and tree are placeholders of the right size; depths are 0. None where the
        graph for it has not been captured yet."""
        graphs = None if self.runner.hooks.is_used else self.runner.ragged_graphs
        key = None if graphs is None else graphs.key_of(batch)
        if graphs is None or key is None:
            return self._eager(batch)
        captured = graphs.cache.captured.get(key)
        if captured is None:
            return None
        with self._beside() as ready:
            graphs.load(captured, key, batch, batch.input_ids)
        return GraphAhead(graphs, captured, self.runner.platform, ready)

    def _eager(self, batch: ModelWorkerBatch) -> EagerAhead:
        with self._beside() as ready:
            on_device = self.runner.new_forward_batch(batch)
            plan = self.runner.attn_backend.init_forward_metadata(on_device)
        on_device.attn_plan = replace(plan, stream=self.stream, event=ready)
        return EagerAhead(self.runner, on_device)

    @contextmanager
    def _beside(self) -> Iterator[Event | None]:
        """Runs the body on the plan stream; gives the event that is recorded at its end."""
        if self.stream is None:
            yield None
            return
        platform = self.runner.platform
        self.stream.wait_stream(platform.current_stream())
        ready = platform.new_event()
        try:
            with platform.on_stream(self.stream):
                yield ready
                ready.record(self.stream)
        except BaseException:  # no event is waited for where no plan was made
            platform.current_stream().wait_stream(self.stream)
            raise
