"""Runs the forwards of one model in pieces."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from specengine.core.batch import ForwardBatch
from specengine.core.parallel import Communicator, NoLink
from specengine.core.platform import Graph
from specengine.core.registry import (
    DEFAULT_SPLITTING_OPS,
    PIECEWISE_COMPILERS,
    SPLITTING_OPS,
    load_place,
)
from specengine.layers.in_place import weights_of
from specengine.layers.split_ops import TracedContext
from specengine.runner import fallbacks
from specengine.runner.context import ForwardContext
from specengine.runner.graph_cache import GraphCache
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.piecewise.cache import CompileCache, default_folder
from specengine.runner.piecewise.pieces import Piece, PieceRun
from specengine.runner.piecewise.split import cut
from specengine.runner.piecewise.trace import INPUTS, trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PiecewiseOptions:
    """sizes: padded numbers of tokens. compiler and splits: names of the registry. folder: of what
    was compiled; None is the default one."""

    sizes: tuple[int, ...]
    compiler: str = "eager"
    splits: tuple[str, ...] = DEFAULT_SPLITTING_OPS
    folder: Path | None = None


class WholeRun:
    """All parts of a forward at one size; a core.platform.Graph."""

    unguarded = ("outputs",)

    def __init__(self, forwards: PiecewiseForwards, size: int) -> None:
        self.forwards, self.size = forwards, size
        self.given = forwards.given_at(size)
        self.outputs: list[Tensor] = []  # of the last replay: hidden states, and features

    def replay(self) -> None:
        self.forwards.shared.size = self.size
        self.outputs = list(self.forwards.graph(*self.given))


class PiecewiseForwards:
    """Serves any forward of up to the largest size. A batch is padded to the next size: padding
    tokens have id 0 and position 0, attention skips them, and no KV is written for them.

    On a CPU nothing is captured: the pieces run one after the other, by the same way.
    """

    unguarded = ("graph", "context", "cache", "traced")

    def __init__(
        self,
        runner: ForwardContext,
        options: PiecewiseOptions,
        ranks: Communicator = NoLink.communicator,
        shares: bool = False,
    ) -> None:
        """Traces and compiles the model, which takes seconds. ranks: that share its layers.
        shares: whether other engines have forwards of their own, and parts of the experts."""
        self.runner, self.options = runner, options
        self.sizes = sorted(options.sizes)
        self.cache = GraphCache[int, WholeRun]("piecewise", runner.graph_memory, self._guard_of)
        self.counters = self.cache.counters
        device, model = runner.device, runner.model
        self.inputs = {
            name: torch.zeros(self.sizes[-1], dtype=torch.int64, device=device) for name in INPUTS
        }
        assert isinstance(model, nn.Module)
        self.context = TracedContext.of(model, ranks)
        self.captures_graphs = runner.graph_memory.platform.has_graphs
        self.captures_late = self.captures_graphs and not shares
        self.shared = PieceRun(checks=runner.guard_of() is not None)
        adaptor = load_place(PIECEWISE_COMPILERS[options.compiler])()
        self.compiled = CompileCache(adaptor, device, options.folder or default_folder())
        self._build()

    @torch.inference_mode()
    def _build(self) -> None:
        start = perf_counter()
        runner = self.runner
        traced = trace(runner.model, runner.batch_fields["feature_layers"], runner.device)
        seconds = self.seconds = perf_counter() - start  # of the trace
        splits = [load_place(SPLITTING_OPS[name]) for name in self.options.splits]
        self.graph, pieces = cut(traced.graph, {one.operator: one.run for one in splits})
        for name in pieces:
            made = self.compiled.get(cast(GraphModule, self.graph.get_submodule(name)))
            piece = Piece(name, made, self.shared, is_last=name == pieces[-1])
            setattr(self.graph, name, piece)
        self.given = traced.given
        logger.info(
            "traced the model in %.1f s: %d pieces, %d compiled and %d loaded, %.1f s",
            seconds,
            len(pieces),
            self.compiled.compiled,
            self.compiled.loaded,
            perf_counter() - start - seconds,
        )

    def refresh(self) -> None:
        """Behind other weights, put in the place of those that were traced. On a GPU they are at
        the same addresses. On a CPU they may have another form (layers/in_place.py): the model is
        traced again where it no longer has a tensor that the trace takes. Packed weights are none
        of these: a trace calls their modules by number."""
        if self.captures_graphs:
            return
        held = {id(one) for one in weights_of(cast(nn.Module, self.runner.model))}
        if not all(id(one) in held for one in self.given if isinstance(one, Tensor)):
            self.cache.captured.clear()
            self._build()

    def _guard_of(self, run: WholeRun) -> GraphGuard | None:
        return self.runner.guard_of(pieces=self, model=self.runner.model)

    def given_at(self, size: int) -> list[int | Tensor]:
        """What the cut graph takes: the first `size` places of the inputs, and the weights."""
        views = {name: one[:size] for name, one in self.inputs.items()}
        return [
            views[one] if isinstance(one, str) else size if isinstance(one, int) else one
            for one in self.given
        ]

    def capture(self) -> None:
        """The largest size, whose memory the others use again: each of them is captured when it is
        first needed, or while there is no work. Of engines that share experts all sizes: what a
        graph takes all of them measure, and later they have different sizes to run."""
        if self.captures_late or not self.captures_graphs:
            for capture in islice(self.captures(), 1):
                capture()
            return
        for size in self.runner.graph_memory.affordable(self.sizes[::-1], "sizes of pieces"):
            self.cache.get(size, self._make)

    def captures(self) -> Iterator[Callable[[], object]]:
        """What captures a size each, of those that have not been, largest first."""
        if self.captures_graphs:
            for size in reversed(self.sizes):
                if size not in self.cache.captured:
                    yield partial(self.cache.get, size, self._make, logging.DEBUG)

    def _make(self, size: int) -> tuple[Graph, WholeRun]:
        run = WholeRun(self, size)
        if self.captures_graphs:
            self.record(run)
        return run, run

    def record(self, run: WholeRun) -> None:
        """Capture all pieces. There is no batch: splitting operations do nothing."""
        self.shared.record = self.cache.record
        try:
            measured = self.runner.graph_memory.measured()
            with torch.inference_mode(), measured, self.context.running(None):
                run.replay()
        finally:
            self.shared.record, run.outputs = None, []

    def size_of(self, num_tokens: int) -> int | None:
        """The padded size; None for more tokens than any."""
        index = bisect.bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def fallback_reason(self, batch: ForwardBatch) -> str | None:
        """Why a batch does not run in pieces; None where it does."""
        size = self.size_of(batch.num_tokens)
        if batch.forward_mode.is_split_prefill():
            return fallbacks.SPLIT_BY_LAYERS
        if size is None:
            return fallbacks.TOO_MANY_TOKENS
        if self.captures_graphs and not self.captures_late and size not in self.cache.captured:
            return fallbacks.MEMORY_SPENT
        return None if self.cache.has_memory_for(size) else fallbacks.MEMORY_SPENT

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Hidden states behind the final norm, [T, H], of a planned batch, which gets the features;
        None where it does not run in pieces, whose reason is counted."""
        reason = self.fallback_reason(batch)
        if reason is not None:
            self.cache.count_fallback(reason)
            return None
        count, size = batch.num_tokens, self.size_of(batch.num_tokens)
        assert size is not None
        captured = self.cache.get(size, self._make)
        for name, buffer in self.inputs.items():
            buffer[:count].copy_(getattr(batch, name))
            buffer[count:size].zero_()
        with self.context.running(batch):
            self.cache.replay(captured)
        hidden, *features = (one[:count] for one in captured.buffers.outputs)
        captured.buffers.outputs = []
        batch.layer_features = features
        # A later graph of the pool may write there, before the drafter has read it.
        return hidden.clone()
