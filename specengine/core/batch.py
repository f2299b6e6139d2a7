"""The three forms of a batch: ScheduleBatch -> ModelWorkerBatch -> ForwardBatch.

Shape legend, used in tensor names and docstrings throughout. A digit is a fixed size.
B requests, N draft nodes a request (root included), K drafts of a chain or the k best of a row,
D levels, C candidates for the nodes of a tree, P those whose children are drafted next, M some of
the nodes, W tokens of each request in one forward or nodes of an accepted path, T = sum of new
tokens over the batch, R rows that logits are computed for, V vocabulary, H hidden size, F size of
a drafter's features, L layers, E experts, S KV slots. Other meanings are said beside the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.core.columns import request_columns
from specengine.core.errors import PlanMismatchError
from specengine.core.forward_mode import ForwardMode
from specengine.core.platform import Event, Stream
from specengine.core.request import Req, ReqState
from specengine.core.transfer import Tokens, int64, sent
from specengine.core.tree import Tree

if TYPE_CHECKING:
    from specengine.core.interfaces import (
        AttentionLayer,
        AttentionLimits,
        KVPool,
        ReqToTokenTable,
        StatePool,
    )
    from specengine.core.sampling_batch import SamplingBatch
    from specengine.kernels.attention.types import Expansion, HeadNorms, PagedBatch
    from specengine.kernels.delta.types import PromptBatch, Save

__all__ = [
    "AttentionBackend",
    "AttnPlan",
    "ForwardBatch",
    "ForwardMode",
    "ModelWorkerBatch",
    "ScheduleBatch",
]


@dataclass
class ScheduleBatch:
    """The scheduler's view of one forward: requests and policy, nothing on the device."""

    reqs: list[Req]
    forward_mode: ForwardMode
    input_ids: Tokens  # flat new tokens; for DECODE the last token of each request (its root)
    prefix_lens: list[int]  # tokens whose KV is written already
    extend_lens: list[int]  # new tokens of each request
    samples: list[bool]  # False where no token follows: an unfinished chunk, a retracted request
    sampling: SamplingBatch  # row i belongs to reqs[i]
    state_saves: tuple[Save, ...] = ()  # recurrent state to keep within these prompts

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @property
    def prompt_reqs(self) -> list[Req]:
        """A prefill's requests, without those that decode a token along with it."""
        return [req for req in self.reqs if req.state is not ReqState.RUNNING]

    def get_model_worker_batch(self) -> ModelWorkerBatch:
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            input_ids=int64(self.input_ids),
            req_pool_indices=[req.row for req in self.reqs],
            prefix_lens=list(self.prefix_lens),
            extend_lens=list(self.extend_lens),
            logits_rows=self._logits_rows(),
            sampling=self.sampling,
            state_saves=self.state_saves,
        )

    def _logits_rows(self) -> list[int] | None:
        """Flat rows whose logits are read: the last one of each request that samples, and
        every row of a request that wants prompt logprobs."""
        if not self.forward_mode.is_prefill():
            return None
        rows: list[int] = []
        ends = accumulate(self.extend_lens)
        each = zip(self.reqs, self.extend_lens, ends, self.samples, strict=True)
        for req, count, end, samples in each:
            if req.sampling.prompt_logprobs is not None and not req.output_ids:
                rows.extend(range(end - count, end))
            elif samples:
                rows.append(end - 1)
        return rows


@dataclass(frozen=True)
class ModelWorkerBatch:
    """A frozen snapshot of what a forward needs. No Req: it may outlive the scheduler's state."""

    forward_mode: ForwardMode
    input_ids: Tensor  # int64 [T], any device
    req_pool_indices: list[int]  # [B]
    prefix_lens: list[int]  # [B]
    extend_lens: list[int]  # [B], sums up to T
    logits_rows: list[int] | None  # flat rows to run the head on; None is every row
    sampling: SamplingBatch | None
    tree: Tree | None = None  # TARGET_VERIFY with branches only
    state_saves: tuple[Save, ...] = ()  # recurrent state to keep within these prompts

    @classmethod
    def idle(cls) -> ModelWorkerBatch:
        """A batch of no request and no token."""
        no_tokens = torch.zeros(0, dtype=torch.int64)
        return cls(ForwardMode.IDLE, no_tokens, [], [], [], [], None)

    @property
    def batch_size(self) -> int:
        return len(self.req_pool_indices)

    @property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)


@dataclass(frozen=True)
class AttnPlan:
    """What `init_forward_metadata` returns. A forward runs on the plan its batch carries."""

    backend: str
    mode: ForwardMode
    batch_size: int
    num_tokens: int
    metadata: Any = None  # the backend's own
    # of latent attention: keys and values are expanded, and the backend is not asked
    expansion: Expansion | None = None
    stream: Stream | None = None  # where it was prepared, when not the current one
    event: Event | None = None  # recorded when it was ready

    def check(self, batch: ForwardBatch) -> None:
        """Raise PlanMismatchError unless this plan was made for a batch of this form."""
        have = (self.backend, self.mode, self.batch_size, self.num_tokens)
        want = (
            batch.attn_backend.name,
            batch.forward_mode,
            batch.batch_size,
            batch.num_tokens,
        )
        if have != want:
            raise PlanMismatchError(
                f"attention plan {have} does not fit the batch {want} "
                "(backend, mode, requests, tokens); call init_forward_metadata first"
            )


class AttentionBackend(ABC):
    """One attention implementation. K and V of the new tokens are in the pool when it is called,
    but for forward_fused, which writes them. What is not overridden is so for most.

    `init_forward_metadata` plans a forward and puts the plan on the batch; the capture and replay
    forms do the same on the fixed buffers of a graph. A plan reads neither tokens nor the mask of
    batch.tree, which may be filled in until the forward runs.
    """

    name: str
    limits: AttentionLimits  # for all modes but those that `for_mode` gives to another

    def for_mode(self, mode: ForwardMode) -> AttentionBackend:
        """The backend that serves this mode: itself, or one of those it is made of."""
        return self

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan: ...

    @abstractmethod
    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan: ...

    def init_forward_metadata_replay(self, batch: ForwardBatch, plan: AttnPlan) -> None:
        """Nothing to do where the graph reads the batch's fixed buffers."""
        return

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        norms: HeadNorms | None,
    ) -> Tensor | None:
        """Normalises heads of q and k (None: not at all), rotates them, writes k and v to the pool
        and attends, at once: q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim] -> the
        shape of q. None, and nothing done, where the backend has no such thing for this batch."""
        return None

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        """What a kernel takes that attends for the whole model at once; None: ask each layer."""
        return None

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """q [B, num_heads, head_dim], a row a request -> the same, or [B, num_heads, value_dim]."""
        return self.forward_extend(q, layer, batch)

    @abstractmethod
    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """q [T, num_heads, head_dim], ragged by qo_indptr; causal after the prefix, or under
        batch.tree -> as of forward_decode."""


@dataclass
class ForwardBatch:
    """Tensors on the device, plus references to the attention backend and the pools.

    `seq_lens` counts the tokens of each request including those that this forward writes:
    seq_lens = prefix_lens + extend_lens, in every mode. New token j of request i is written to
    slot req_to_token[req_pool_indices[i], prefix_lens[i] + j]; its rotary position is the same
    number, except under a tree, where it is prefix_lens[i] - num_past + depth.
    """

    unguarded = ("layer_features",)  # runner/graph_guard.py

    forward_mode: ForwardMode
    batch_size: int
    num_tokens: int
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    out_cache_loc: Tensor  # int64 [T], KV slots written by this forward
    req_pool_indices: Tensor  # int64 [B]
    prefix_lens: Tensor  # int64 [B]
    extend_lens: Tensor  # int64 [B]
    seq_lens: Tensor  # int64 [B]
    qo_indptr: Tensor  # int64 [B + 1], where each request's rows start
    prefix_lens_cpu: list[int]
    extend_lens_cpu: list[int]
    logits_rows: Tensor | None  # int64 [R]
    req_to_token_pool: ReqToTokenTable
    token_to_kv_pool: KVPool
    attn_backend: AttentionBackend
    tree: Tree | None = None
    attn_plan: AttnPlan | None = None  # set by init_forward_metadata
    # int64, by row of the page table: tokens before it are not attended to, by backends that can
    first_keys: Tensor | None = None
    state_saves: tuple[Save, ...] = ()
    prompts: PromptBatch | None = field(default=None, repr=False)  # set by what reads it first
    states: StatePool | None = None  # set by the runner, where its model keeps recurrent state
    attn_layers: tuple[AttentionLayer, ...] = ()  # set by the runner: those of its model, in order
    compiles: bool = False  # set by the runner: decoder layers go through torch.compile
    feature_layers: tuple[int, ...] = ()  # set by the runner: layers that leave their output below
    layer_features: list[Tensor] = field(default_factory=list, repr=False)  # [T, H] a layer
    features: Tensor | None = field(default=None, repr=False)  # [T, F], what a drafter takes in
    # int64 [R]: rows whose output is wanted; all leave their KV. A model may give these alone.
    # last: makes the batch of these rows, each request's last one, when the last layer asks for it
    kept_rows: Tensor | None = field(default=None, repr=False)
    last: Callable[[ForwardBatch], ForwardBatch] | None = field(default=None, repr=False)

    # SPLIT_PREFILL: carried from call to call
    split_index: int = 0  # layers done
    hidden_states: Tensor | None = field(default=None, repr=False)  # [T, H], or parts: RMSNorm.add
    residual: Tensor | None = field(default=None, repr=False)  # [T, H]

    @property
    def max_extend_len(self) -> int:
        return max(self.extend_lens_cpu, default=0)

    @property
    def max_seq_len(self) -> int:
        pairs = zip(self.prefix_lens_cpu, self.extend_lens_cpu, strict=True)
        return max((p + e for p, e in pairs), default=0)

    @classmethod
    def init_new(
        cls,
        batch: ModelWorkerBatch,
        device: torch.device,
        req_to_token_pool: ReqToTokenTable,
        token_to_kv_pool: KVPool,
        attn_backend: AttentionBackend,
        **others: Any,
    ) -> ForwardBatch:
        """The one place where batch metadata crosses to the device, in one copy. others: further
        fields."""
        columns = request_columns(batch.req_pool_indices, batch.prefix_lens, batch.extend_lens)
        if batch.logits_rows is not None:
            columns.ints("logits_rows", batch.logits_rows)
        if is_on_host := batch.input_ids.device.type == "cpu":
            columns.ints("input_ids", batch.input_ids.numpy())
        on_device = columns.send(device)
        prefix, extend = on_device["prefix_lens"], on_device["extend_lens"]
        rows_T, positions = on_device["rows_T"], on_device["places_T"]
        slots = req_to_token_pool.req_to_token[rows_T, positions]
        if batch.tree is not None:
            firsts = prefix.repeat_interleave(extend, output_size=batch.num_tokens)
            positions = firsts - batch.tree.num_past + sent(batch.tree.depths_T, device)
        return cls(
            forward_mode=batch.forward_mode,
            batch_size=batch.batch_size,
            num_tokens=batch.num_tokens,
            input_ids=on_device["input_ids"] if is_on_host else sent(batch.input_ids, device),
            positions=positions,
            out_cache_loc=slots.to(torch.int64),
            req_pool_indices=on_device["req_pool_indices"],
            prefix_lens=prefix,
            extend_lens=extend,
            seq_lens=on_device["seq_lens"],
            qo_indptr=on_device["qo_indptr"],
            prefix_lens_cpu=list(batch.prefix_lens),
            extend_lens_cpu=list(batch.extend_lens),
            logits_rows=on_device.get("logits_rows"),
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool=token_to_kv_pool,
            attn_backend=attn_backend,
            tree=batch.tree,
            state_saves=batch.state_saves,
            **others,
        )
