"""Forwards prepared on a stream of their own, beside what the current stream does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from specengine.core.batch import ForwardBatch, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.transfer import sent
from specengine.runner.forward_graphs.ragged import ForwardBuffers, RaggedGraphs
from specengine.runner.graph_cache import Captured
from specengine.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class EagerAhead:
    """A forward that lacks its tokens and its tree. Its plan carries the event of its being ready,
    for which the runner makes the current stream wait."""

    runner: ModelRunner
    batch: ForwardBatch

    @torch.inference_mode()
    def run(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """batch: what was prepared, with tokens and tree."""
        self.runner.check_plan(self.batch)
        self.batch.input_ids = sent(batch.input_ids, self.runner.device)
        if batch.tree is not None:
            assert self.batch.tree is not None
            self.batch.tree.mask_BNN.copy_(sent(batch.tree.mask_BNN, self.runner.device))
            self.batch.positions += sent(batch.tree.depths_T, self.runner.device)
        return self.runner.forward(self.batch, skip_attn_backend_init=True)

    def drop(self) -> None:
        """It is not run. What it holds is the plan stream's own."""


@dataclass(frozen=True)
class GraphAhead:
    """The same in the buffers of a graph, which no other forward may use in between."""

    graphs: RaggedGraphs
    captured: Captured[ForwardBuffers]
    ready: torch.cuda.Event | None

    def run(self, batch: ModelWorkerBatch) -> LogitsOutput:
        self.drop()
        tokens = sent(batch.input_ids, self.captured.buffers.buffer.device)
        return self.graphs.launch(self.captured, batch, tokens)

    def drop(self) -> None:
        """The next forward on the current stream finds the buffers at rest."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)


@dataclass
class PlanStream:
    """Hands over three times, each time by an event:

    - All that the current stream was given so far comes before what is prepared: the page table,
      and forwards whose plans, buffers and memory are used again.
    - What is prepared comes before the forward that runs on it, or before whatever uses its
      buffers in its place.
    - What the host wrote to pinned memory stays until it was copied: the backend's affair.

    Without a GPU it prepares on the spot.
    """

    runner: ModelRunner
    stream: torch.cuda.Stream | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.runner.device.type == "cuda":
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def begin(self, batch: ModelWorkerBatch) -> EagerAhead | GraphAhead | None:
        """batch: tokens and tree are placeholders of the right size; depths are 0. None where a
        graph that serves it is still to be captured."""
        graphs = self.runner.ragged_graphs
        key = None if graphs is None else graphs.key_of(batch)
        if graphs is None or key is None:
            return self._eager(batch)
        captured = graphs.cache.captured.get(key)
        if captured is None:
            return None
        with self._beside() as ready:
            graphs.load(captured, key, batch, batch.input_ids)
        return GraphAhead(graphs, captured, ready)

    def _eager(self, batch: ModelWorkerBatch) -> EagerAhead:
        with self._beside() as ready:
            on_device = self.runner.new_forward_batch(batch)
            plan = self.runner.attn_backend.init_forward_metadata(on_device)
        on_device.attn_plan = replace(plan, stream=self.stream, event=ready)
        return EagerAhead(self.runner, on_device)

    @contextmanager
    def _beside(self) -> Iterator[torch.cuda.Event | None]:
        """Gives the event that is recorded when all of it was launched."""
        if self.stream is None:
            yield None
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            yield ready
            ready.record(self.stream)
