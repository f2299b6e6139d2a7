"""The pre-norm decoder layer that target models and drafters share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specengine.kernels.linear import few_row, layer_tail
from specengine.kernels.linear.types import Projection, Tail, TailWeights
from specengine.layers.attention import Attention
from specengine.layers.compiled import after_attention, before_attention, compiled
from specengine.layers.layer_spec import COMPILED, FEW_ROWS, LAYER_TAIL, PLAIN, LayerSpec
from specengine.layers.linear import Linear, MergedLinear
from specengine.layers.mlp import GatedMLP
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch

# Merged projections of a layer -> their parts in checkpoints.
PACKED_MODULES: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class SelfAttention(nn.Module):
    """q, k, v projections, optional q/k norm, attention over the KV pool, output projection."""

    def __init__(
        self,
        spec: LayerSpec,
        layer_id: int,
        rotary: RotaryEmbedding,
        input_size: int | None = None,
    ) -> None:
        """input_size: of what the projections read, where it is not hidden_size."""
        super().__init__()
        self.head_dim = spec.head_dim
        self.sizes = [spec.num_heads * spec.head_dim] + [spec.num_kv_heads * spec.head_dim] * 2
        self.qkv_proj = MergedLinear(input_size or spec.hidden_size, self.sizes, spec.qkv_bias)
        self.o_proj = Linear(self.sizes[0], spec.hidden_size, spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.attn = Attention(
            spec.num_heads,
            spec.head_dim,
            spec.attention_scale,
            spec.num_kv_heads,
            layer_id,
            rotary,
            spec.sliding_window,
        )

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, hidden_size] -> [T, hidden_size], perhaps in parts, for RMSNorm.add."""
        return self.o_proj.parts(self.attend(positions, self.qkv_proj(hidden), batch))

    def attend(self, positions: Tensor, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, q + k + v] -> the heads' outputs, [T, num_heads * head_dim]."""
        q, k, v = torch.split(qkv, self.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.head_dim)).view(k.shape)
        out: Tensor = self.attn(positions, q, k, v, batch)
        return out


def tail_weights(attention: SelfAttention, norm: RMSNorm, mlp: GatedMLP) -> TailWeights:
    """Of what stands behind attention in a layer without biases there, unpacked."""
    return TailWeights(
        attention.o_proj.plain, norm.weight, mlp.gate_up_proj.plain, mlp.down_proj.plain
    )


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm. The residual stream is carried beside the
    layer's output and added inside the next norm."""

    def __init__(self, spec: LayerSpec, layer_id: int, rotary: RotaryEmbedding) -> None:
        """Raises ModelLoadError for a layer that is described with what nothing computes."""
        super().__init__()
        PLAIN.require(spec)
        self.spec = spec
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.stream_eps)
        self.self_attn = SelfAttention(spec, layer_id, rotary)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.stream_eps)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
        self.num_weights = spec.num_weights()
        self._takes_compiled = COMPILED.takes(spec)
        self._takes_few_rows = FEW_ROWS.takes(spec)
        self._takes_tail = LAYER_TAIL.takes(spec)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the layer [T, hidden_size], perhaps in parts, for RMSNorm.add, and the residual
        stream before it is added; None where the output is the whole stream already."""
        if batch.compiles and self._takes_compiled:
            return self.forward_compiled(positions, hidden, residual, batch)
        stream = hidden if residual is None else residual
        few_rows = self._takes_few_rows and not batch.compiles
        if few_rows and few_row.fits(stream, self.num_weights):
            stream = self.input_layernorm.stream(hidden, residual)
            return self.forward_few_rows(positions, stream, batch), None
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(positions, hidden, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp.parts(hidden), residual

    def is_streamed(self, hidden: Tensor, batch: ForwardBatch) -> bool:
        """Whether `forward_streamed` is the way for rows [T, hidden_size]."""
        if batch.compiles or not self._takes_tail or self.self_attn.o_proj.kernel is not None:
            return False
        whole_tiles = sum(self.self_attn.sizes) % layer_tail.TILE == 0
        return whole_tiles and layer_tail.fits(hidden, self._tail_weights())

    def forward_streamed(
        self,
        positions: Tensor,
        before: Tail,
        batch: ForwardBatch,
        following: DecoderLayer | None,
    ) -> Tail:
        """The same layer, all behind attention in one kernel, which goes on to the projection of
        the following layer. before: the stream, and this layer's projection, if that was made."""
        qkv, norm = before.qkv, self.input_layernorm
        if qkv is None:
            qkv = self.self_attn.qkv_proj(norm(before.stream))
        heads = self.self_attn.attend(positions, qkv, batch)
        projection = None if following is None else following._projection()
        return layer_tail.layer_tail(
            heads, before.stream, self._tail_weights(), norm.eps, projection
        )

    def _tail_weights(self) -> TailWeights:
        return tail_weights(self.self_attn, self.post_attention_layernorm, self.mlp)

    def _projection(self) -> Projection:
        qkv_proj = self.self_attn.qkv_proj
        return Projection(self.input_layernorm.weight, qkv_proj.plain, qkv_proj.bias)

    def forward_compiled(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """The same layer through torch.compile, but for attention."""
        attention, mlp, qkv_proj = self.self_attn, self.mlp, self.self_attn.qkv_proj
        norm = self.input_layernorm
        qkv, stream = compiled(before_attention)(
            hidden, residual, norm.weight, norm.eps, qkv_proj.plain, qkv_proj.bias
        )
        heads = attention.attend(positions, qkv, batch)
        norm = self.post_attention_layernorm
        linears = attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        output, gate_up, down = ((linear.plain, linear.bias) for linear in linears)
        given = stream, output, norm.weight, norm.eps, gate_up, down
        added, stream = compiled(after_attention)(heads, *given)
        return added, stream

    def forward_few_rows(self, positions: Tensor, stream: Tensor, batch: ForwardBatch) -> Tensor:
        """The same layer in one kernel a weight: residual stream in, residual stream out."""
        attention, mlp = self.self_attn, self.mlp
        norm, qkv_proj = self.input_layernorm, attention.qkv_proj
        qkv = few_row.norm_linear(stream, norm.weight, norm.eps, qkv_proj.plain, qkv_proj.bias)
        heads = attention.attend(positions, qkv, batch)
        stream = few_row.linear_add(heads, attention.o_proj.plain, stream)
        norm = self.post_attention_layernorm
        gated = few_row.norm_gated_linear(stream, norm.weight, norm.eps, mlp.gate_up_proj.plain)
        return few_row.linear_add(gated, mlp.down_proj.plain, stream)
