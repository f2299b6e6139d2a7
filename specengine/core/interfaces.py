"""Protocols between packages that may not import each other (design: one-way imports)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specengine.kernels.attention.types import ExpandedHeads
    from specengine.kernels.delta.types import DeltaState, NodeUpdates, StatePaths
    from specengine.kernels.kv.types import KVPaths


class ReqToTokenTable(Protocol):
    """memory.ReqToTokenPool: the page table, one row a request."""

    req_to_token: Tensor  # int32 [rows, max_context_len] on the device: position -> KV slot


class KVPool(Protocol):
    """memory.MHATokenToKVPool: one K and one V tensor a layer."""

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [S, num_kv_heads, head_dim] each; of a layer with a value_dim, V is
        the first value_dim numbers of K. No request owns slot 0."""
        ...

    def keep_paths(self, paths: KVPaths) -> None:
        """Move the KV of the accepted path of each tree, in every layer, to where a chain would
        have written it: kernels.kv.kv_move."""
        ...


class StatePool(Protocol):
    """memory.StatePool: what layers keep of a request whatever its length."""

    device: torch.device

    def state(self, layer_id: int) -> DeltaState: ...

    def updates(self, layer_id: int) -> NodeUpdates:
        """The updates of the nodes of the last verification."""
        ...

    def keep_paths(self, paths: StatePaths) -> None:
        """Move requests on to the last node of each accepted path: kernels.delta.delta_rule."""
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
    value_dim: int | None  # V is the first numbers of K, so many; None: V is apart from K
    expanded: ExpandedHeads | None  # of latent attention: the heads that K and V stand for
    scale: float
    sliding_window: int | None
    attention_chunk: int | None  # a query sees its own chunk of so many positions; excludes windows
    sinks: Tensor | None  # [num_heads], logits beside the scores that have no value
    softcap: float | None  # scores are softcap * tanh(score / softcap)
    rotary: Rotary | None


@dataclass(frozen=True)
class AttentionLimits:
    """What an attention backend can serve; None is anything."""

    dtypes: frozenset[torch.dtype] | None = None
    head_dims: frozenset[int] | None = None
    windows_under_trees: bool = True
    softcap: bool = False  # caps scores where a layer says so
    sinks: bool = False  # adds sinks to the softmax where a layer has them
    layers_alike: bool = False  # heads, scale, window and softcap of every layer must be the same
    graphs: bool = True  # its forwards can be captured in graphs
    plans_on_host: bool = False  # from prefix_lens_cpu and extend_lens_cpu, which it must be given
    fp8_kv: bool = False  # reads K and V in float8_e4m3fn
    chunks: bool = False  # attends within chunks (AttentionLayer.attention_chunk)
    shared_kv: bool = False  # attends where V is a part of K (AttentionLayer.value_dim)
    first_keys: bool = False  # keeps unseen what lies before a request's first key
    precompiles: bool = False  # all that it launches is this project's: kernels.precompile holds it


@dataclass
class LogitsOutput:
    """What a target forward gives back."""

    logits: Tensor  # [R, V] in float32; R = len(logits_rows), or T
    argmax: Tensor | None = None  # int64 [R], where the graph already took it
    hidden: Tensor | None = None  # [T, H] after the final norm; [R, H] of ForwardBatch.kept_rows
    features: Tensor | None = None  # [T, F], outputs of the runner's feature_layers, joined


@dataclass
class RowsOutput:
    """What the target's forward gives a drafter that observes a round on the device."""

    hidden: Tensor  # [T, H] after the final norm
    features: Tensor | None  # [T, F], outputs of the runner's feature_layers, joined
