"""Runs one model: chooses a graph or an eager forward, and the forward by mode."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch, RowBatch, Tree
from specengine.core.errors import PlanMismatchError
from specengine.core.interfaces import (
    AttentionBackend,
    DecoderModel,
    KVPool,
    LogitsOutput,
    ReqToTokenTable,
)
from specengine.kernels.row_places import row_places
from specengine.layers.attention import attention_layers
from specengine.runner.attention.limits import check_layers
from specengine.runner.extend_graphs import ExtendGraphRunner
from specengine.runner.graph_counters import PLANS_ON_HOST, NoGraphs
from specengine.runner.graph_guard import GraphGuard, inputs_of
from specengine.runner.graph_memory import GraphMemory
from specengine.runner.graphs import DecodeGraphRunner
from specengine.runner.prepared import (
    EagerForward,
    GraphForward,
    PartsForward,
    PreparedForward,
)
from specengine.runner.ragged_graphs import RaggedGraphRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPools:
    """The page table and the KV that it points into."""

    req_to_token_pool: ReqToTokenTable
    token_to_kv_pool: KVPool


class ModelRunner:
    """Owns a model, its attention backend and its graphs.

    `forward` is the one door: a captured graph where one fits, otherwise
    forward_decode / forward_extend / forward_split_prefill / forward_idle by the batch's mode.
    """

    def __init__(
        self,
        model: DecoderModel,
        device: torch.device,
        pools: MemoryPools,
        attn_backend: AttentionBackend,
        capture_layers: tuple[int, ...] = (),
        graph_memory: GraphMemory | None = None,
    ) -> None:
        """capture_layers: ascending; what a drafter takes its features from. graph_memory: of
        another runner of the engine, to share it."""
        self.model = model
        self.device = device
        self.pools = pools
        self.attn_backend = attn_backend
        self.attn_layers = attention_layers(model)
        self.capture_layers = capture_layers
        self.graph: DecodeGraphRunner | None = None  # set by capture_graphs
        self.extend_graph: ExtendGraphRunner | None = None  # likewise
        self.no_extend_graphs: NoGraphs | None = None  # likewise, where there are no others
        self.ragged_graph: RaggedGraphRunner | None = None  # set by whoever wants it
        self.graph_memory = graph_memory or GraphMemory()
        self.guards_graphs = False  # checks their inputs before each replay
        self.compile_max_bs = 0  # largest batch size that is captured through torch.compile
        self.first_keys: Tensor | None = None  # of its row batches; set by a drafter that may sleep
        self.num_eager = 0  # forwards that no graph served
        self._even: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for layer in self.attn_layers[:1]:
            k_cache, _ = pools.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            check_layers(attn_backend, self.attn_layers, k_cache.dtype)

    def capture_graphs(self, batch_sizes: list[int], padding: bool) -> None:
        """Capture graphs of decode steps and, with padding, of short prefills. Does nothing where
        graphs do not exist (CPU)."""
        if self.device.type != "cuda" or not batch_sizes:
            return
        self.graph = DecodeGraphRunner(self, batch_sizes, padding)
        self.graph.capture()
        if not padding or self.attn_backend.limits.plans_on_host:
            reason = PLANS_ON_HOST if padding else "padding off"
            self.no_extend_graphs = NoGraphs("prefill", reason)
            return
        self.extend_graph = ExtendGraphRunner(self)
        self.extend_graph.capture()

    def new_forward_batch(self, batch: ModelWorkerBatch) -> ForwardBatch:
        on_device = ForwardBatch.init_new(
            batch,
            self.device,
            self.pools.req_to_token_pool,
            self.pools.token_to_kv_pool,
            self.attn_backend,
        )
        on_device.attn_layers = self.attn_layers
        on_device.capture_layers = self.capture_layers
        return on_device

    def guard_of(self, **owners: object) -> GraphGuard | None:
        """Over all that they hold, this runner among it, where graphs are guarded."""
        return GraphGuard(partial(inputs_of, owners)) if self.guards_graphs else None

    def prepare(self, batch: ModelWorkerBatch) -> PreparedForward:
        """A forward whose tokens and tree may still be filled in when it runs."""
        graphs = self.ragged_graph
        if graphs is not None:
            parts = [GraphForward(graphs, form, part) for form, part in graphs.forms_of(batch)]
            if parts:
                return parts[0] if len(parts) == 1 else PartsForward(batch, parts)
        return EagerForward(self, self.new_forward_batch(batch))

    def new_row_batch(
        self, rows: RowBatch, tokens_BW: Tensor, offset: int = 0, tree: Tree | None = None
    ) -> ForwardBatch:
        """A forward over W new tokens of each request, `offset` places after those that stand:
        planned, and made on the device alone. A tree's past nodes are all that lies between."""
        B, W = tokens_BW.shape
        table = self.pools.req_to_token_pool.req_to_token
        assert tree is None or tree.num_past == offset, "depths count from what stands"
        depths_T = None if tree is None else tree.depths_T
        places = row_places(table, rows.rows_B, rows.lens_B, W, offset, depths_T)
        is_decode = W == 1 and tree is None
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.TARGET_VERIFY,
            batch_size=B,
            num_tokens=B * W,
            input_ids=tokens_BW.reshape(-1),
            positions=places.positions_T,
            out_cache_loc=places.slots_T,
            req_pool_indices=rows.rows_B,
            prefix_lens=rows.lens_B,
            extend_lens=self._even_lens(B, W)[0],
            seq_lens=places.seq_lens_B,
            qo_indptr=self._even_lens(B, W)[1],
            prefix_lens_cpu=[table.shape[1] - W] * B,  # as long as they may get
            extend_lens_cpu=[W] * B,
            logits_rows=None,
            req_to_token_pool=self.pools.req_to_token_pool,
            token_to_kv_pool=self.pools.token_to_kv_pool,
            attn_backend=self.attn_backend,
            attn_layers=self.attn_layers,
            tree=tree,
            first_keys=self.first_keys,
            compiles=self.compile_max_bs >= B,
            capture_layers=self.capture_layers,
        )
        self.attn_backend.init_forward_metadata_capture(batch)
        return batch

    def _even_lens(self, requests: int, width: int) -> tuple[Tensor, Tensor]:
        """extend_lens and qo_indptr of requests of one width. Made once, so that a graph, which
        runs before it is captured, holds no node for them."""
        key = (requests, width)
        if key not in self._even:
            lens = torch.full((requests,), width, dtype=torch.int64, device=self.device)
            starts = torch.arange(0, requests * width + 1, width, device=self.device)
            self._even[key] = lens, starts
        return self._even[key]

    @torch.inference_mode()
    def forward(
        self, batch: ModelWorkerBatch | ForwardBatch, skip_attn_backend_init: bool = False
    ) -> LogitsOutput:
        """Run the model and the head on the rows that the batch asks for.

        A ModelWorkerBatch may be served by a graph, which copies it straight into its fixed
        buffers. A ForwardBatch runs eagerly; with skip_attn_backend_init it runs on the AttnPlan
        that it carries, and PlanMismatchError is raised if that does not fit.
        """
        if isinstance(batch, ModelWorkerBatch):
            if self.graph is not None and self.graph.can_run(batch):
                return self.graph.replay(batch)
            if self.extend_graph is not None:
                output = self.extend_graph.run(batch)
                if output is not None:
                    return output
            elif self.no_extend_graphs is not None and batch.forward_mode is ForwardMode.EXTEND:
                self.no_extend_graphs.count()
            if self.ragged_graph is not None:
                form = self.ragged_graph.form_of(batch)
                if form is not None:
                    return self.ragged_graph.replay(form, batch, batch.input_ids)[0]
            batch = self.new_forward_batch(batch)
        return self.forward_eager(batch, skip_attn_backend_init)

    def forward_eager(self, batch: ForwardBatch, skip_attn_backend_init: bool) -> LogitsOutput:
        self.num_eager += 1
        if batch.forward_mode.is_idle() or batch.num_tokens == 0:
            return self._logits(self.forward_idle(batch), batch)
        if not skip_attn_backend_init:
            self.attn_backend.init_forward_metadata(batch)
        self.check_plan(batch)
        if batch.forward_mode.is_split_prefill():
            hidden = self.forward_split_prefill(batch, self.model.num_layers)
            assert hidden is not None
        elif batch.forward_mode.is_decode():
            hidden = self.forward_decode(batch)
        else:
            hidden = self.forward_extend(batch)
        return self._logits(hidden, batch)

    def check_plan(self, batch: ForwardBatch) -> None:
        if batch.attn_plan is None:
            raise PlanMismatchError("the batch carries no attention plan; plan it first")
        batch.attn_plan.check(batch)
        if batch.attn_plan.event is not None:
            torch.cuda.current_stream().wait_event(batch.attn_plan.event)

    def forward_decode(self, batch: ForwardBatch) -> Tensor:
        """One token a request -> hidden states [B, H]."""
        return self.model.forward(batch.input_ids, batch.positions, batch)

    def forward_extend(self, batch: ForwardBatch) -> Tensor:
        """Several tokens a request (EXTEND, MIXED, TARGET_VERIFY, DRAFT_EXTEND) -> [T, H]."""
        return self.model.forward(batch.input_ids, batch.positions, batch)

    def forward_idle(self, batch: ForwardBatch) -> Tensor:
        """The model on zero tokens, without attention metadata -> [0, H]."""
        return self.model.forward(batch.input_ids, batch.positions, batch)

    def forward_split_prefill(self, batch: ForwardBatch, num_layers: int) -> Tensor | None:
        """Run the next `num_layers` layers of an extend -> [T, H] after the last one, else None.

        State between the calls (hidden_states, residual, split_index) stays on the batch.
        """
        end = min(batch.split_index + num_layers, self.model.num_layers)
        return self.model.forward_split_prefill(batch.input_ids, batch.positions, batch, end)

    @torch.inference_mode()
    def split_prefill(
        self, batch: ForwardBatch, num_layers: int, skip_attn_backend_init: bool = False
    ) -> LogitsOutput | None:
        """One call of a split prefill: plans on the first, gives logits on the last."""
        if batch.forward_mode is not ForwardMode.SPLIT_PREFILL:
            raise ValueError(f"split_prefill needs a SPLIT_PREFILL batch, not {batch.forward_mode}")
        if batch.split_index == 0 and not skip_attn_backend_init:
            self.attn_backend.init_forward_metadata(batch)
        self.check_plan(batch)
        hidden = self.forward_split_prefill(batch, num_layers)
        return None if hidden is None else self._logits(hidden, batch)

    def _logits(self, hidden: Tensor, batch: ForwardBatch) -> LogitsOutput:
        rows = hidden if batch.logits_rows is None else hidden[batch.logits_rows]
        features = torch.cat(batch.captured, dim=-1) if batch.captured else None
        return LogitsOutput(self.model.head.logits(rows), hidden=hidden, features=features)
