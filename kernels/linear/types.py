"""Weights and results of fused layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specengine.kernels.attention.types import PagedBatch

MOST_FEW_TAIL_ROWS, MOST_TAIL_ROWS = 8, 32  # that layer_tail.cu takes, and layer_tail_wgmma.cu


@dataclass(frozen=True)
class Projection:
    """A norm and the product behind it."""

    gain: Tensor  # [H]
    weight: Tensor  # [Q, H]
    bias: Tensor | None  # [Q]


@dataclass(frozen=True)
class TailWeights:
    """The weights of one layer: H hidden, A of the heads together, I intermediate."""

    out: Tensor  # [H, A]
    gain: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], gate rows before up rows
    down: Tensor  # [H, I]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, A, I."""
        return *self.out.shape, self.down.shape[1]


@dataclass(frozen=True)
class Tail:
    """stream: [T, H] behind the layer; qkv: [T, Q] of the next projection, where there is one."""

    stream: Tensor
    qkv: Tensor | None


MOST_STACK_ROWS = 16


@dataclass(frozen=True)
class StackShape:
    """Sizes of every layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: H hidden, A of the heads together, Q of the projections, I
    intermediate."""

    input_gain: Tensor  # [H]
    qkv: Tensor  # [Q, H]
    out: Tensor  # [H, A]
    gain: Tensor  # [H]
    gate_up: Tensor  # [2 I, H], gate rows before up rows
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class StackWeights:
    """All that a forward does not change. cos_sin: float32 [C, head_dim], as RotaryEmbedding."""

    shape: StackShape
    layers: Sequence[LayerWeights]
    cos_sin: Tensor
    eps: float
    scale: float


@dataclass(frozen=True)
class StackKV:
    """Where a forward's KV goes. k, v: [S, kv_heads, head_dim] of each layer; loc: int64 [T]."""

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    loc: Tensor


@dataclass(frozen=True)
class StackOutput:
    """stream: [T, H] behind the last layer; layer_features: [T, H] behind each feature layer."""

    stream: Tensor
    layer_features: list[Tensor]


def most_tasks(rows: int, shape: StackShape, batch: PagedBatch) -> int:
    """Parts of attention that blocks have to be there for: 16 rows of a KV head of a request."""
    group = shape.heads // shape.kv_heads
    tiles = len(batch.seq_lens) * -(-batch.max_queries * group // 16)
    return min(tiles, rows * group) * shape.kv_heads
