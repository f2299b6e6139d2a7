"""Runs one model: chooses a graph or an eager forward, and the forward by mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch, ModelWorkerBatch
from specengine.core.errors import PlanMismatchError
from specengine.core.interfaces import KVPool, LogitsOutput, ReqToTokenTable, StatePool
from specengine.core.interruption import interruption_point
from specengine.core.last_rows import MANY_ROWS, keep_last, reads_last_rows
from specengine.core.model import DecoderModel
from specengine.core.platform import platform_of
from specengine.core.rows import RowBatch
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.sharing import ExpertSharers
from specengine.core.tree import Tree
from specengine.layers.attention import attention_layers
from specengine.layers.logits import RowMap
from specengine.layers.sampler import ONE_TO_ONE, RowDraws, Sampler
from specengine.memory.state_pool import StateSizes
from specengine.runner import fallbacks
from specengine.runner.attention.limits import check_graphs, check_layers
from specengine.runner.context import joined_features
from specengine.runner.dispatch import whole_graph, why_no_prefill_graphs
from specengine.runner.fallbacks import NoGraphs
from specengine.runner.forward_graphs.decode import DecodeGraphs
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.forward_graphs.prepared import (
    EagerForward,
    GraphForward,
    PartsForward,
    PreparedForward,
)
from specengine.runner.forward_graphs.ragged import RaggedGraphs
from specengine.runner.graph_guard import GraphGuard, inputs_of
from specengine.runner.layer_hooks import LayerHooks
from specengine.runner.memory.graph_memory import GraphMemory
from specengine.runner.memory.kept_state import make_states
from specengine.runner.piecewise.forwards import PiecewiseForwards
from specengine.runner.row_batches import RowBatches


@dataclass(frozen=True)
class MemoryPools:
    """The page table, the KV that it points into, and recurrent state by its rows. states: None
    lets the runner of a model that keeps any make a pool of its own, without snapshots."""

    req_to_token_pool: ReqToTokenTable
    token_to_kv_pool: KVPool
    states: StatePool | None = None


class ModelRunner:
    """Owns a model, its attention backend and its graphs. `forward` runs a captured graph where one
    serves the batch, otherwise forward_decode / forward_extend / forward_split_prefill /
    forward_idle by the batch's mode."""

    def __init__(
        self,
        model: DecoderModel,
        device: torch.device,
        pools: MemoryPools,
        attn_backend: AttentionBackend,
        feature_layers: tuple[int, ...] = (),
        graph_memory: GraphMemory | None = None,
        *,
        guards_graphs: bool = False,
        compile_max_bs: int = 0,
    ) -> None:
        """feature_layers: ascending; the layers whose outputs a drafter reads. graph_memory: of the
        engine, whose runners share it. guards_graphs: check the inputs of graphs before each
        replay. compile_max_bs: largest batch size that is captured through torch.compile."""
        self.model = model
        self.device, self.platform = device, platform_of(device)
        if pools.states is None:
            rows = pools.req_to_token_pool.req_to_token.shape[0]
            pools = replace(pools, states=make_states(model, StateSizes(rows), device))
        self.pools = pools
        self.attn_backend = attn_backend
        self.attn_layers = attention_layers(model)
        self.feature_layers = feature_layers
        self.graph_memory = graph_memory or GraphMemory(platform=self.platform)
        self.guards_graphs, self.compile_max_bs = guards_graphs, compile_max_bs
        self.num_eager = 0  # forwards that no graph served
        self.sampler = Sampler()
        # Set while an engine is built, in this order, where it has the feature:
        self.sharers: ExpertSharers | None = None  # sharing.share_experts, with its number there
        self.number = 0
        self.first_keys: Tensor | None = None  # of its row batches: a drafter that can pause
        self.reads_hidden = True  # build._engine_of, where only the head does: False
        self.pieces: PiecewiseForwards | None = None  # piecewise_build.add_pieces
        self.ragged_graphs: RaggedGraphs | None = None  # forward_graphs_build.add_ragged_graphs
        self.decode_graphs: DecodeGraphs | None = None  # capture_graphs, as is the next
        self.prefill_graphs: PrefillGraphs | NoGraphs | None = None
        self.hooks = LayerHooks(model.num_layers)
        self._row_batches = RowBatches(self)
        for one in self.attn_layers[:1]:
            k_cache, _ = pools.token_to_kv_pool.get_kv_buffer(one.layer_id)
            check_layers(attn_backend, self.attn_layers, k_cache.dtype)

    def capture_graphs(self, batch_sizes: list[int], padding: bool) -> None:
        """Of decode steps and, with padding, of short prompts; on a CPU there are none."""
        if not self.platform.has_graphs or not batch_sizes:
            return
        if self.sharers is not None:
            self.prefill_graphs = NoGraphs("prefill", fallbacks.SHARES_EXPERTS)
            return
        check_graphs(self.attn_backend)
        self.decode_graphs = DecodeGraphs(self, batch_sizes, padding)
        self.decode_graphs.capture()
        backend, keeps_state = self.attn_backend, self.pools.states is not None
        if (reason := why_no_prefill_graphs(backend, keeps_state, padding)) is not None:
            self.prefill_graphs = NoGraphs("prefill", reason)
            return
        self.prefill_graphs = PrefillGraphs(self)
        self.prefill_graphs.capture()

    def captures(self) -> Iterator[Callable[[], object]]:
        """Captures of forwards over prompts that are made while there is no work."""
        if isinstance(self.prefill_graphs, PrefillGraphs):
            yield from self.prefill_graphs.captures()
        if self.pieces is not None:
            yield from self.pieces.captures()

    @property
    def page_table(self) -> Tensor:
        return self.pools.req_to_token_pool.req_to_token

    @property
    def batch_fields(self) -> dict[str, Any]:
        """The fields that every ForwardBatch of this runner shares."""
        return {
            "req_to_token_pool": self.pools.req_to_token_pool,
            "token_to_kv_pool": self.pools.token_to_kv_pool,
            "attn_backend": self.attn_backend,
            "states": self.pools.states,
            "attn_layers": self.attn_layers,
            "feature_layers": self.feature_layers,
        }

    def new_forward_batch(
        self, batch: ModelWorkerBatch, attn_backend: AttentionBackend | None = None
    ) -> ForwardBatch:
        """attn_backend: in place of the runner's own."""
        fields = self.batch_fields
        if attn_backend is not None:
            fields["attn_backend"] = attn_backend
        return ForwardBatch.init_new(batch, self.device, **fields)

    def guard_of(self, **owners: object) -> GraphGuard | None:
        """A guard over all tensors that the owners hold, or None where graphs are not guarded."""
        return GraphGuard(partial(inputs_of, owners)) if self.guards_graphs else None

    def prepare(self, batch: ModelWorkerBatch) -> PreparedForward:
        """A planned forward whose tokens and tree may be given when it runs."""
        graphs = None if self._is_hooked(batch) else self.ragged_graphs
        if graphs is not None:
            parts = [GraphForward(graphs, key, part) for key, part in graphs.parts_of(batch)]
            if parts:
                return parts[0] if len(parts) == 1 else PartsForward(batch, parts)
        on_device = self.new_forward_batch(batch)
        self.attn_backend.init_forward_metadata(on_device)
        return EagerForward(on_device, self.forward)

    def new_row_batch(
        self, rows: RowBatch, tokens_BW: Tensor, offset: int = 0, tree: Tree | None = None
    ) -> ForwardBatch:
        """See RowBatches.make."""
        return self._row_batches.make(rows, tokens_BW, offset, tree)

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
            output = None if self._is_hooked(batch) else whole_graph(self, batch)
            if output is not None:
                return output
            on_device = self.new_forward_batch(batch)
            if self._leaves_rows_out(batch):
                self.attn_backend.init_forward_metadata(on_device)
                keep_last(on_device)
                skip_attn_backend_init = True
            batch = on_device
        return self.forward_eager(batch, skip_attn_backend_init)

    def _leaves_rows_out(self, batch: ModelWorkerBatch) -> bool:
        """Whether the last layer may compute the last rows of prompts alone. Engines that share
        experts have exchanged how many rows a forward has."""
        if self.reads_hidden or self.sharers is not None or not batch.forward_mode.is_prefill():
            return False
        return batch.num_tokens - batch.batch_size > MANY_ROWS and reads_last_rows(batch)

    def _is_hooked(self, batch: ModelWorkerBatch) -> bool:
        """Whether hooks look at layers, which graphs would not call; counts the batch then."""
        if not self.hooks.is_used:
            return False
        kinds = {"decode": self.decode_graphs, "prefill": self.prefill_graphs}
        kind = "decode" if batch.forward_mode.is_decode() else "prefill"
        if (graphs := kinds[kind]) is not None:
            fallbacks.count_fallback(graphs.counters, kind, fallbacks.HOOKED)
        return True

    def forward_eager(self, batch: ForwardBatch, skip_attn_backend_init: bool) -> LogitsOutput:
        if self.sharers is None or not batch.num_tokens:
            return self._run_eager(batch, skip_attn_backend_init)
        with self.sharers.forward(self.number, batch.num_tokens):
            return self._run_eager(batch, skip_attn_backend_init)

    def _run_eager(self, batch: ForwardBatch, skip_attn_backend_init: bool) -> LogitsOutput:
        if batch.forward_mode.is_idle() or batch.num_tokens == 0:
            self.num_eager += 1
            return self.logits(self.forward_idle(batch), batch)
        if not skip_attn_backend_init:
            self.attn_backend.init_forward_metadata(batch)
        self.check_plan(batch)
        hidden = self._hidden_in_pieces(batch)
        if hidden is None:
            self.num_eager += 1
            hidden = self._hidden_eager(batch)
        return self.logits(hidden, batch)

    def _hidden_in_pieces(self, batch: ForwardBatch) -> Tensor | None:
        """None where there are no pieces, or they do not serve the batch, which is counted then."""
        if self.pieces is None:
            return None
        if self.hooks.is_used:
            self.pieces.cache.count_fallback(fallbacks.HOOKED)
            return None
        return self.pieces.run(batch)

    def _hidden_eager(self, batch: ForwardBatch) -> Tensor:
        if batch.forward_mode.is_split_prefill():
            hidden = self.forward_split_prefill(batch, self.model.num_layers)
            assert hidden is not None
            return hidden
        if batch.forward_mode.is_decode():
            return self.forward_decode(batch)
        return self.forward_extend(batch)

    def check_plan(self, batch: ForwardBatch) -> None:
        if batch.attn_plan is None:
            raise PlanMismatchError("the batch carries no attention plan; plan it first")
        batch.attn_plan.check(batch)
        if batch.attn_plan.event is not None:
            self.platform.current_stream().wait_event(batch.attn_plan.event)

    def forward_decode(self, batch: ForwardBatch) -> Tensor:
        """One token a request -> hidden states [B, H]."""
        interruption_point()
        return self.hooks.forward(self.model, batch)

    def forward_extend(self, batch: ForwardBatch) -> Tensor:
        """Several tokens a request (EXTEND, MIXED, TARGET_VERIFY, DRAFT_EXTEND) -> [T, H]."""
        interruption_point()
        return self.hooks.forward(self.model, batch)

    def forward_idle(self, batch: ForwardBatch) -> Tensor:
        """The model on zero tokens, without attention metadata -> [0, H]."""
        return self.model.forward(batch.input_ids, batch.positions, batch)

    def forward_split_prefill(self, batch: ForwardBatch, num_layers: int) -> Tensor | None:
        """Run the next `num_layers` layers of an extend -> [T, H] after the last one, else None.
        State between the calls (hidden_states, residual, split_index) stays on the batch."""
        end = min(batch.split_index + num_layers, self.model.num_layers)
        return self.model.forward_split_prefill(batch.input_ids, batch.positions, batch, end)

    @torch.inference_mode()
    def split_layers(self, batch: ForwardBatch, num_layers: int) -> Tensor | None:
        """One call of a split prefill: the first plans, the last gives [T, H] for `logits`, others
        None."""
        if not batch.forward_mode.is_split_prefill():
            raise ValueError(f"split_layers needs a SPLIT_PREFILL batch, not {batch.forward_mode}")
        if batch.split_index == 0:
            batch.attn_backend.init_forward_metadata(batch)
        self.check_plan(batch)
        return self.forward_split_prefill(batch, num_layers)

    def sample(
        self,
        output: LogitsOutput | Tensor,
        sampling: SamplingBatch | RowDraws | None = None,
        rows: RowMap = ONE_TO_ONE,
    ) -> Tensor:
        """int64 [R], the token that plain decoding chooses at each row: the one place where what a
        forward gives becomes the target's tokens, of prefills, rounds on the host and rounds on
        the device, within a capture or not.

        sampling: a batch of the host, which edits the logits of `output` as its requests ask, rows
        saying what each row decides; or RowDraws, of logits that are edited already; or None, for
        the best tokens of hidden states, [R, H], whose logits are not needed.
        """
        if isinstance(output, Tensor):
            return self.model.head.best(output)
        if isinstance(sampling, RowDraws):
            return self.sampler.draw(output.logits, sampling)
        assert sampling is not None, "logits become tokens as requests ask"
        return self.sampler(output, sampling, rows)

    def logits(self, hidden: Tensor, batch: ForwardBatch) -> LogitsOutput:
        places, kept_R = batch.logits_rows, batch.kept_rows
        if places is not None and kept_R is not None and len(hidden) < batch.num_tokens:
            places = torch.searchsorted(kept_R, places)  # the model has left rows out
        logits = self.model.head.logits(hidden if places is None else hidden[places])
        return LogitsOutput(logits, hidden=hidden, features=joined_features(batch))
