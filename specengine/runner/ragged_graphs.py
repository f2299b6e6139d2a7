"""CUDA graphs of forwards over a few tokens of each request: verification, ragged or under trees,
and the forwards of drafters. Each is captured when it is first needed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch, Tree
from specengine.core.interfaces import LogitsOutput
from specengine.core.transfer import pinned, sent
from specengine.runner.graph_counters import MEMORY_SPENT, count_fallback
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.graphs import capture, without_garbage_collection
from specengine.runner.prefill_parts import is_launch_bound, parts_of
from specengine.runner.ragged_forms import Form, Inputs, Sizes, num_inputs, pack

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedForward:
    """A graph and its fixed buffers, which must live as long as it does."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor  # what `inputs` views
    inputs: Inputs
    batch: ForwardBatch
    output: LogitsOutput  # rows of the filling included
    guard: GraphGuard | None

    def last_rows(self, batch_size: int) -> Tensor:
        """int64 [B], of the last token of each request that was loaded."""
        return self.inputs.qo_indptr[1 : batch_size + 1] - 1

    def fill(
        self,
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None,
        last_B: Tensor | None,
    ) -> None:
        """In what lies on the device: the rest was loaded."""
        if tokens.device == self.buffer.device:
            self.inputs.token_T[: batch.num_tokens].copy_(tokens)
        if last_B is not None:
            self.inputs.token_T.index_copy_(0, self.last_rows(batch.batch_size), last_B)
        if batch.tree is not None:
            self._show(batch.tree, batch.num_tokens)
        if features is not None:
            assert self.batch.features is not None
            self.batch.features[: batch.num_tokens].copy_(features)

    def tell_lengths(self, values: Tensor, form: Form) -> None:
        """To a backend that plans on the host."""
        inputs = Inputs.of(values, form)
        self.batch.prefix_lens_cpu = inputs.prefix_lens_N.tolist()
        self.batch.extend_lens_cpu = inputs.extend_lens_N.tolist()

    def _show(self, tree: Tree, num_tokens: int) -> None:
        """Rows and columns past a request's nodes keep what is there: nobody reads them."""
        assert self.batch.tree is not None
        if tree.depths_T.device == self.buffer.device:
            self.inputs.depth_T[:num_tokens].copy_(tree.depths_T)
        requests, nodes, seen = tree.mask_BNN.shape
        place = self.batch.tree.mask_BNN[:requests, :nodes, :seen]
        place.copy_(sent(tree.mask_BNN, place.device))


class RaggedGraphRunner:
    """Replays forwards of the modes it was made for."""

    unguarded = ("captured",)

    def __init__(
        self,
        runner: ModelRunner,
        kind: str,
        modes: frozenset[ForwardMode],
        sizes: Sizes,
        counters: Counter[str],
    ) -> None:
        """kind: as the log and /metrics call these graphs. counters: of all of the kind."""
        self.runner = runner
        self.kind = kind
        self.modes = modes
        self.sizes = sizes
        self.counters = counters
        self.takes_parts = is_launch_bound(runner.model)
        self.captured: dict[Form, CapturedForward] = {}

    def form_of(self, batch: ModelWorkerBatch) -> Form | None:
        """That of the graph that serves this batch. Where none does, counts the reason; other modes
        are not its business."""
        if batch.forward_mode not in self.modes or batch.num_tokens == 0:
            return None
        form = self.sizes.form_of(batch)
        if isinstance(form, Form):
            if form in self.captured or not self.runner.graph_memory.is_spent:
                return form
            form = MEMORY_SPENT
        count_fallback(self.counters, self.kind, form)
        return None

    def forms_of(self, batch: ModelWorkerBatch) -> list[tuple[Form, ModelWorkerBatch]]:
        """The batch and the form of its graph; prompts that no graph holds at once as parts with
        theirs, where launches take longer than a layer. Nothing where none serves it."""
        parts = [batch]
        if batch.forward_mode in self.modes and self.takes_parts:
            limits = self.sizes.limits_of_parts(batch)
            parts = parts if limits is None else parts_of(batch, *limits)
        found = [(form, part) for part in parts if (form := self.form_of(part)) is not None]
        return found if len(found) == len(parts) else []

    @torch.inference_mode()
    def replay(
        self,
        form: Form,
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> tuple[LogitsOutput, CapturedForward]:
        """Run a batch of this form. The output views the graph's buffers: read it before the next
        replay. tokens: int64 [T], anywhere; features: [T, F], what a drafter's model takes in
        beside tokens; last_B: int64 [B] on the device, in place of each request's last one."""
        captured = self.prepare(form, features)
        self.load(captured, form, batch, tokens)
        return self.launch(captured, batch, tokens, features, last_B), captured

    @torch.inference_mode()
    def prepare(self, form: Form, features: Tensor | None) -> CapturedForward:
        """Capture it, where that has not been done. features: of any number of tokens."""
        captured = self.captured.get(form)
        if captured is None:
            captured = self.captured[form] = self._capture(form, features)
        return captured

    def load(
        self, captured: CapturedForward, form: Form, batch: ModelWorkerBatch, tokens: Tensor
    ) -> None:
        """Bring what the host knows of a batch to the buffers, and plan it."""
        values = torch.from_numpy(pack(batch, tokens, form))
        if self.runner.attn_backend.limits.plans_on_host:
            captured.tell_lengths(values, form)
        captured.buffer.copy_(pinned(values, self.runner.device), non_blocking=True)
        assert captured.batch.attn_plan is not None
        self.runner.attn_backend.init_forward_metadata_replay(
            captured.batch, captured.batch.attn_plan
        )

    @torch.inference_mode()
    def launch(
        self,
        captured: CapturedForward,
        batch: ModelWorkerBatch,
        tokens: Tensor,
        features: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        """Run a batch that was loaded, but for what of it lies on the device."""
        captured.fill(batch, tokens, features, last_B)
        if captured.guard is not None:
            captured.guard.check()
        captured.graph.replay()
        self.counters["replays"] += 1
        return _first_rows(captured.output, batch)

    @torch.inference_mode()
    def _capture(self, form: Form, features: Tensor | None) -> CapturedForward:
        """On requests of nobody's alone, so that no KV is overwritten."""
        start = perf_counter()
        nobody = ModelWorkerBatch(form.mode, torch.empty(0), [], [], [], [], None)
        buffer = torch.zeros(num_inputs(form), dtype=torch.int64, device=self.runner.device)
        buffer.copy_(torch.from_numpy(pack(nobody, nobody.input_ids, form)))
        inputs = Inputs.of(buffer, form)
        batch = self._fixed_batch(form, inputs)
        if features is not None:
            batch.features = features.new_zeros(form.num_tokens, features.shape[1])
        self.runner.attn_backend.init_forward_metadata_capture(batch)
        with without_garbage_collection(), self.runner.graph_memory.measured():
            graph, output = capture(self._run(form, inputs, batch), self.runner.graph_memory.pool)
        self.counters["captures"] += 1
        seconds = perf_counter() - start
        logger.info("captured a %s graph in %.2f s: %s", self.kind, seconds, form)
        guard = self.runner.guard_of(graphs=self, batch=batch)
        return CapturedForward(graph, buffer, inputs, batch, output, guard)

    def _run(self, form: Form, inputs: Inputs, batch: ForwardBatch) -> Callable[[], LogitsOutput]:
        table, model = self.runner.pools.req_to_token_pool.req_to_token, self.runner.model

        def run() -> LogitsOutput:
            batch.out_cache_loc.copy_(table[inputs.row_T, inputs.place_T])
            if batch.tree is not None:
                torch.add(inputs.base_T, inputs.depth_T, out=batch.positions)
            batch.captured.clear()
            hidden = self.runner.forward_extend(batch)
            rows = hidden[inputs.logits_rows_N] if form.logits == "chosen" else hidden
            logits = hidden[:0] if form.logits == "none" else model.head.logits(rows)
            features = torch.cat(batch.captured, dim=-1) if batch.captured else None
            return LogitsOutput(logits, hidden=hidden, features=features)

        return run

    def _fixed_batch(self, form: Form, inputs: Inputs) -> ForwardBatch:
        tree, positions = None, inputs.place_T
        if form.num_past is not None:
            shape = form.num_requests, form.width, form.num_past + form.width
            mask = torch.zeros(shape, dtype=torch.bool, device=self.runner.device)
            mask[:, :, form.num_past :] = torch.eye(form.width, dtype=torch.bool)
            tree = Tree(inputs.depth_T, mask, form.num_past)
            positions = torch.zeros_like(inputs.place_T)
        return ForwardBatch(
            forward_mode=form.mode,
            batch_size=form.num_requests,
            num_tokens=form.num_tokens,
            input_ids=inputs.token_T,
            positions=positions,
            out_cache_loc=torch.zeros_like(inputs.place_T),
            req_pool_indices=inputs.rows_N,
            prefix_lens=inputs.prefix_lens_N,
            extend_lens=inputs.extend_lens_N,
            seq_lens=inputs.seq_lens_N,
            qo_indptr=inputs.qo_indptr,
            prefix_lens_cpu=inputs.prefix_lens_N.tolist(),
            extend_lens_cpu=inputs.extend_lens_N.tolist(),  # the most of a request is among them
            logits_rows=None,
            req_to_token_pool=self.runner.pools.req_to_token_pool,
            token_to_kv_pool=self.runner.pools.token_to_kv_pool,
            attn_backend=self.runner.attn_backend,
            attn_layers=self.runner.attn_layers,
            tree=tree,
            compiles=form.num_requests <= self.runner.compile_max_bs,
            capture_layers=self.runner.capture_layers,
        )


def _first_rows(output: LogitsOutput, batch: ModelWorkerBatch) -> LogitsOutput:
    count, rows = batch.num_tokens, batch.logits_rows
    assert output.hidden is not None
    return LogitsOutput(
        logits=output.logits[: count if rows is None else len(rows)],
        hidden=output.hidden[:count],
        features=None if output.features is None else output.features[:count],
    )
