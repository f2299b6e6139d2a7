"""The inputs and outputs of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Where each request's queries and keys are. Only max_queries and max_keys are known to the
    host: bounds that shape the launch, and may be larger than what the tensors say."""

    req_to_token: Tensor  # int32 [rows, C], slot of each position
    req_pool_indices: Tensor  # int64 [B], row of req_to_token
    seq_lens: Tensor  # int64 [B], keys of each request, the new ones included
    qo_indptr: Tensor  # int64 [B + 1], queries of request b: qo_indptr[b] .. qo_indptr[b + 1] - 1
    positions: Tensor  # int64 [T], read only for a window under a tree
    max_queries: int
    max_keys: int
    # bool [B, N, num_past + N], contiguous, N at least each request's queries
    tree_mask: Tensor | None = None
    num_past: int = 0  # nodes of the tree that are keys only: the last ones before the queries
    # int64 [rows], by row of req_to_token: tokens before it are not seen
    first_keys: Tensor | None = None
    counters: Tensor | None = None  # int32 zeros, left as zeros; without them KV is never split


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each head of q and of k by itself, as linear.norm has them, before any
    rotation by attention itself."""

    q_weight: Tensor  # [D], of q's dtype or float32
    k_weight: Tensor  # the same
    eps: float


@dataclass(frozen=True)
class ExpandedHeads:
    """Heads of latent attention once keys and values are computed from latents."""

    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class KeySpan:
    """The rows of one request, and its keys."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int


@dataclass(frozen=True)
class Expansion:
    """Which latents a forward expands: slots of all keys of all requests, one after the other."""

    slots: Tensor  # int64 [K]
    spans: tuple[KeySpan, ...]


@dataclass(frozen=True)
class FlashKeys:
    """Where each request's queries and keys are. Lengths are read on the device: the two bounds
    shape the launch, and may be larger than what the tensors say."""

    table: Tensor  # int32 [rows, C], slot of each place
    rows: Tensor | None  # int32 [B], row of table; None: request b has row b
    seq_lens: Tensor  # int32 [B], keys of each request
    qo_indptr: Tensor  # int32 [B + 1], where each request's queries start
    max_queries: int
    max_keys: int
    causal: bool  # the queries are the last tokens of the keys, and see none that follow


@dataclass(frozen=True)
class FlashOutput:
    """Rows that see no key have an output of 0, or an lse of minus infinity, or both undefined."""

    out: Tensor  # [T, Hq, D]
    lse: Tensor  # float32 [Hq, T], log of the sum of exp(scale * q . k), or of what is capped


# (q [T, Hq, D], k_cache and v_cache [S, Hk, D], keys, scale, window, softcap, sinks [Hq] or None)
# -> FlashOutput, whose lse is undefined where there are sinks.
# Contiguous in the last dimension, float16 or bfloat16, D up to 256 and a multiple of 8. With a
# window, which needs causal keys, a query sees the last `window` keys up to its own. With a
# softcap, scores are softcap * tanh(scale * q . k / softcap).
FlashAttention = Callable[
    [Tensor, Tensor, Tensor, FlashKeys, float, int | None, float | None, Tensor | None],
    FlashOutput,
]
