"""Protocols between rooms that may not import each other (design: one-way imports)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specengine.core.batch import AttnPlan, ForwardBatch
    from specengine.kernels.head_topk import BlockPartials
    from specengine.kernels.kv_move import KVPaths
    from specengine.kernels.paged_attention import PagedBatch


class ReqToTokenTable(Protocol):
    """memory.ReqToTokenPool: the page table, one row a request."""

    req_to_token: Tensor  # int32 [rows, max_context_len] on the device: position -> KV slot


class KVPool(Protocol):
    """memory.MHATokenToKVPool: one K and one V tensor a layer."""

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each [S, num_kv_heads, head_dim]. Slot 0 belongs to nobody."""
        ...

    def keep_paths(self, paths: KVPaths) -> None:
        """Move the KV of the accepted path of each tree, in every layer, to where a chain would
        have written it: kernels.kv_move."""
        ...


class Rotary(Protocol):
    """layers.RotaryEmbedding, as attention sees it."""

    @property
    def cos_sin_cache(self) -> Tensor:
        """float32 [P, rotary_dim], cos half then sin half."""
        ...


class AttentionLayer(Protocol):
    """layers.Attention, as a backend sees it."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    rotary: Rotary | None


@dataclass(frozen=True)
class AttentionLimits:
    """What an attention backend can serve; None is anything."""

    dtypes: frozenset[torch.dtype] | None = None
    head_dims: frozenset[int] | None = None
    windows_under_trees: bool = True
    layers_alike: bool = False  # heads, scale and window of every layer must be the same
    plans_on_host: bool = False  # from prefix_lens_cpu and extend_lens_cpu, which it must be told
    first_keys: bool = False  # keeps unseen what lies before a request's first key
    rehearses: bool = False  # all that it launches is this project's: kernels.rehearsal holds it


class AttentionBackend(Protocol):
    """One attention implementation. K and V of the new tokens are in the pool when it is called,
    but for forward_fused, which writes them.

    `init_forward_metadata` plans a forward and puts the plan on the batch; the capture and replay
    forms do the same on the fixed buffers of a graph. A plan reads neither tokens nor the mask of
    batch.tree, which may be filled in until the forward runs.
    """

    name: str
    limits: AttentionLimits

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan: ...

    def init_forward_metadata_replay(self, batch: ForwardBatch, plan: AttnPlan) -> None: ...

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_len of padding rows, such that they read only slot 0 and divide by nothing."""
        ...

    def forward_fused(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor | None:
        """Rotates q and k, writes k and v to the pool and attends, at once: q [T, num_heads,
        head_dim], k, v [T, num_kv_heads, head_dim] -> the shape of q. None, and nothing done,
        where the backend has no such thing for this batch."""
        ...

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        """What a kernel takes that attends for the whole model at once; None where the backend
        has to be asked layer by layer."""
        ...

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """q [B, num_heads, head_dim], one row a request -> the same shape."""
        ...

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """q [T, num_heads, head_dim], ragged by qo_indptr; causal after the prefix, or under
        batch.tree -> the same shape."""
        ...


@dataclass
class LogitsOutput:
    """What a target forward gives back."""

    logits: Tensor  # [R, V] in float32; R = len(logits_rows), or T
    argmax: Tensor | None = None  # int64 [R], where the graph already took it
    hidden: Tensor | None = None  # [T, H] after the final norm, every row of the batch
    features: Tensor | None = None  # [T, F], outputs of the runner's capture_layers, joined


@dataclass
class RowsOutput:
    """What a forward of rows gives back, where only the best tokens are wanted."""

    best: Tensor  # int64 [T], the token of the largest logit
    hidden: Tensor  # [T, H] after the final norm
    features: Tensor | None  # [T, F], outputs of the runner's capture_layers, joined


class Embedding(Protocol):
    """layers.embedding.VocabEmbedding: the token embedding, which drafters may borrow."""

    def __call__(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H], rows as the checkpoint has them, no multiplier applied."""
        ...


class Head(Protocol):
    """layers.head.Head: what reads tokens from hidden states, which drafters may borrow."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[R, H] -> int64 [R], where `logits` has its largest value, the first among equals, as the
        target numbers tokens."""
        ...

    def top(self, hidden: Tensor, topk: int) -> BlockPartials | None:
        """[R, H] -> the topk best of each row of `logits` and its log-sum-exp, by block of columns;
        None where `logits` is as fast."""
        ...


class DecoderModel(Protocol):
    """A decoder that ModelRunner can run (an nn.Module in target/models)."""

    config: Any
    num_layers: int
    vocab_size: int

    @property
    def embed(self) -> Embedding: ...

    @property
    def head(self) -> Head: ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H]. Outputs of the layers
        batch.capture_layers, residual included, are left on batch.captured in order of depth."""
        ...

    def forward_split_prefill(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor | None:
        """Run layers batch.split_index .. end_layer - 1, carrying state on the batch. Returns the
        final hidden states once the last layer is done, None before."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Consume (checkpoint name, tensor) pairs. Raises ModelLoadError naming any tensor that is
        missing, unexpected or of the wrong shape."""
        ...
