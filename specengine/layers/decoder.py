"""The pre-norm decoder layer that target models and drafters share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from specengine.layers.attention import Attention
from specengine.layers.linear import Linear, MergedLinear
from specengine.layers.mlp import GatedMLP
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding, config_head_dim

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder layer, and where families differ."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k normalised before the rotation (Qwen3)

    @classmethod
    def from_config(cls, config: Any, **family: bool) -> DecoderShape:
        """Sizes of a Hugging Face configuration."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config_head_dim(config),
            rms_norm_eps=config.rms_norm_eps,
            **family,
        )


class SelfAttention(nn.Module):
    """q, k, v projections, optional q/k norm, attention over the KV pool, output projection."""

    def __init__(
        self,
        shape: DecoderShape,
        layer_id: int,
        rotary: RotaryEmbedding,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.sizes = [shape.num_heads * shape.head_dim] + [shape.num_kv_heads * shape.head_dim] * 2
        self.qkv_proj = MergedLinear(shape.hidden_size, self.sizes, shape.qkv_bias)
        self.o_proj = Linear(self.sizes[0], shape.hidden_size, shape.o_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.attn = Attention(
            shape.num_heads,
            shape.head_dim,
            shape.head_dim**-0.5,
            shape.num_kv_heads,
            layer_id,
            rotary,
            sliding_window,
        )

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, hidden_size] -> [T, hidden_size]."""
        q, k, v = self.qkv_proj(hidden).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        out: Tensor = self.o_proj(self.attn(positions, q, k, v, batch))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm. The residual stream is carried beside the
    layer's output and added inside the next norm."""

    def __init__(
        self,
        shape: DecoderShape,
        layer_id: int,
        rotary: RotaryEmbedding,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, layer_id, rotary, sliding_window)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size, shape.mlp_bias)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Output of the layer [T, hidden_size] and the residual stream before it is added."""
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(positions, hidden, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual
