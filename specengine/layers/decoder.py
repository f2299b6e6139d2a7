"""The decoder layer that target models and drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specengine.core.parallel import Cut, communicator, head_cuts
from specengine.kernels.linear import few_row, layer_tail
from specengine.kernels.linear.types import Projection, Tail, TailWeights
from specengine.layers.attention import Attention
from specengine.layers.compiled import (
    LayerTensors,
    LinearWeights,
    NormWeights,
    after_attention,
    before_attention,
    behind_attention,
    compiled,
)
from specengine.layers.experts import SparseMLP, feed_forward
from specengine.layers.gated_delta import GatedDelta
from specengine.layers.layer_spec import COMPILED, FEW_ROWS, LAYER_TAIL, PLAIN, LayerSpec
from specengine.layers.linear import Linear, MergedLinear, RowParallelLinear
from specengine.layers.mlp import FeedForward, GatedMLP
from specengine.layers.norm import NORM_PLACES, Norm, PartNorm, PreNorms, RMSNorm, make_norm
from specengine.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch

# Merged projections of a layer -> their parts in checkpoints.
PACKED_MODULES: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


class SelfAttention(nn.Module):
    """q, k, v projections, optional q/k norm, attention over the KV pool, output projection. A rank
    has some of the heads, and the inputs of the output projection that come from them. With a gate,
    each head of q_proj gives head_dim queries, then as many numbers whose sigmoid scales what the
    head gives."""

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
        spec.check_ranks()
        heads = head_cuts(spec.num_heads, spec.num_kv_heads)
        parts = [one.times(spec.head_dim) for one in (heads.q, heads.kv, heads.kv)]
        self.has_gate = spec.attention_gate
        if self.has_gate:
            parts[0] = heads.q.times(2 * spec.head_dim)
        self.sizes = [one.size for one in parts]
        size, out = input_size or spec.hidden_size, heads.q.times(spec.head_dim)
        self.qkv_proj = MergedLinear(size, self.sizes, spec.qkv_bias, parts)
        self.o_proj = RowParallelLinear(out.whole, spec.hidden_size, spec.o_bias, out)
        self.heads, self.ranks = heads, communicator()
        self.q_norm, self.k_norm = self._qk_norms(spec)
        self.temperature = spec.query_temperature
        self.sinks = (
            nn.Parameter(torch.empty(heads.q.size), requires_grad=False)
            if spec.attention_sinks
            else None
        )
        self.attn = Attention(
            heads.q.size,
            spec.head_dim,
            spec.attention_scale,
            heads.kv.size,
            layer_id,
            rotary if spec.has_rotary else None,
            spec.sliding_window,
            spec.attention_softcap,
            self.sinks,
        )

    def _qk_norms(self, spec: LayerSpec) -> tuple[Norm | None, Norm | None]:
        """Of each head, or of all heads of q and all of k together."""
        q_size, k_size, _ = self.sizes if spec.qk_norm_whole else [spec.head_dim] * 3
        if not (spec.qk_norm or spec.qk_norm_whole):
            return None, None
        eps = spec.rms_norm_eps
        if spec.qk_norm_whole and self.ranks.size > 1:
            q, kv = (one.times(spec.head_dim) for one in (self.heads.q, self.heads.kv))
            copies = max(self.ranks.size // spec.num_kv_heads, 1)
            given = eps, spec.norm_offset
            return PartNorm(q, 1, *given), PartNorm(kv, copies, *given)
        return make_norm(spec, q_size, eps), make_norm(spec, k_size, eps)

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, hidden_size] -> [T, hidden_size]."""
        out: Tensor = self.o_proj(self.attend(positions, self.qkv_proj(hidden), batch))
        return out

    def parts(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The same, perhaps in parts, for RMSNorm.add."""
        return self.o_proj.parts(self.attend(positions, self.qkv_proj(hidden), batch))

    def attend(self, positions: Tensor, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, q + k + v] -> the heads' outputs, [T, num_heads * head_dim]."""
        q, k, v = torch.split(qkv, self.sizes, dim=-1)
        if self.has_gate:
            pairs = q.view(len(q), self.attn.num_heads, 2 * self.head_dim).chunk(2, -1)
            q, gate = (one.flatten(1) for one in pairs)
        if isinstance(self.q_norm, PartNorm) and isinstance(self.k_norm, PartNorm):
            q, k = self._normed_over_ranks(q, self.q_norm, k, self.k_norm)
        elif self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, len(self.q_norm.weight))).view(q.shape)
            k = self.k_norm(k.reshape(-1, len(self.k_norm.weight))).view(k.shape)
        if self.temperature is not None:
            q = self.temperature.scaled(q, positions)
        out: Tensor = self.attn(positions, q, k, v, batch)
        return out * torch.sigmoid(gate) if self.has_gate else out

    def _normed_over_ranks(
        self, q: Tensor, q_norm: PartNorm, k: Tensor, k_norm: PartNorm
    ) -> tuple[Tensor, Tensor]:
        """By one sum over ranks."""
        sums_2T = self.ranks.all_reduce(torch.stack([q_norm.squares(q), k_norm.squares(k)]))
        return q_norm.scaled(q, sums_2T[0]), k_norm.scaled(k, sums_2T[1])

    def cuts(self, kind: str) -> Sequence[Cut | None]:
        """As layers.linear.Linear has it: of the sinks."""
        return [self.heads.q]


def tail_weights(attention: SelfAttention, norm: RMSNorm, mlp: GatedMLP) -> TailWeights:
    """Of what stands behind attention in a layer without biases there, unpacked."""
    return TailWeights(
        attention.o_proj.plain, norm.weight, mlp.gate_up_proj.plain, mlp.down_proj.plain
    )


def is_plain(attention: SelfAttention | GatedDelta, mlp: FeedForward | SparseMLP) -> bool:
    """Whether all products of a layer multiply plain weights; but for those of a mixture of
    experts, which every path leaves to it."""
    parts = *attention.children(), *(mlp.children() if isinstance(mlp, FeedForward) else ())
    return all(one.is_plain for one in parts if isinstance(one, Linear))


class DecoderLayer(nn.Module):
    """Attention, or linear attention, and feed-forward, with norms where the description has them.
    The residual stream is carried beside the layer's output and added inside the next norm.

    Of self_attn and linear_attn a layer has one, which `attention` is.
    input_layernorm and post_attention_layernorm stand before attention and before feed-forward,
    attention_out_norm and mlp_out_norm behind them; those that a layer lacks are None.
    """

    def __init__(self, spec: LayerSpec, layer_id: int, rotary: RotaryEmbedding) -> None:
        """Raises ModelLoadError for a layer that is described with what nothing computes."""
        super().__init__()
        PLAIN.require(spec)
        self.spec = spec
        places = NORM_PLACES[spec.norm_places]
        self.input_layernorm = self._norm(spec.stream_eps, places.before)
        if spec.gated_delta is None:
            self.self_attn = SelfAttention(spec, layer_id, rotary)
        else:
            self.linear_attn = GatedDelta(spec, layer_id)
        self.attention_out_norm = self._norm(spec.rms_norm_eps, places.behind)
        self.post_attention_layernorm = self._norm(spec.stream_eps, places.between)
        self.mlp = feed_forward(spec)
        self.mlp_out_norm = self._norm(spec.rms_norm_eps, places.behind)
        self.num_weights = spec.num_weights()
        self._takes_compiled = COMPILED.takes(spec)
        self._takes_few_rows = FEW_ROWS.takes(spec)
        self._takes_tail = LAYER_TAIL.takes(spec)

    def _norm(self, eps: float, is_there: bool) -> Norm | None:
        return make_norm(self.spec, self.spec.hidden_size, eps) if is_there else None

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the layer [T, hidden_size], perhaps in parts, for RMSNorm.add, and the residual
        stream before it is added; None where the output is the whole stream already."""
        if batch.compiles and self._takes_compiled and self.is_plain:
            return self.forward_compiled(positions, hidden, residual, batch)
        stream = hidden if residual is None else residual
        few_rows = self._takes_few_rows and not batch.compiles
        if few_rows and few_row.fits(stream, self.num_weights) and self.is_plain:
            stream = self.norms.input.stream(hidden, residual)
            return self.forward_few_rows(positions, stream, batch)
        hidden, residual = self._enter(self.input_layernorm, hidden, residual)
        if self.spec.norm_places == "shared":
            return self.attention(positions, hidden, batch) + self.mlp(hidden), residual
        if self.attention_out_norm is None:
            heads = self.attention.parts(positions, hidden, batch)
        else:
            heads = self.attention_out_norm(self.attention(positions, hidden, batch))
        hidden, residual = self._enter(self.post_attention_layernorm, heads, residual)
        if self.mlp_out_norm is None:
            return self.mlp.parts(hidden), residual
        return self.mlp_out_norm(self.mlp(hidden)), residual

    def _enter(
        self, norm: Norm | None, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What attention or feed-forward reads, and the stream, both [T, hidden_size]."""
        if norm is not None:
            return norm.add(hidden, residual)
        stream = hidden if residual is None else hidden + residual
        return self.spec.true_stream(stream), stream

    @property
    def attention(self) -> SelfAttention | GatedDelta:
        return self.self_attn if self.spec.gated_delta is None else self.linear_attn

    @property
    def norms(self) -> PreNorms:
        """For what computes layers with these two alone."""
        first, second = self.input_layernorm, self.post_attention_layernorm
        assert isinstance(first, RMSNorm)
        assert isinstance(second, RMSNorm)
        return PreNorms(first, second)

    @property
    def gated_mlp(self) -> GatedMLP:
        """For what computes layers with this one alone."""
        assert isinstance(self.mlp, GatedMLP), "a path took what it does not compute"
        return self.mlp

    @property
    def is_plain(self) -> bool:
        """Whether every product multiplies a plain weight, which the fused paths read."""
        return is_plain(self.attention, self.mlp)

    def is_streamed(self, hidden: Tensor, batch: ForwardBatch) -> bool:
        """Whether `forward_streamed` is the way for rows [T, hidden_size]."""
        if batch.compiles or not self._takes_tail or not self.is_plain:
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
        qkv, norm = before.qkv, self.norms.input
        if qkv is None:
            qkv = self.self_attn.qkv_proj(norm(before.stream))
        heads = self.self_attn.attend(positions, qkv, batch)
        projection = None if following is None else following._projection()
        return layer_tail.layer_tail(
            heads, before.stream, self._tail_weights(), norm.eps, projection
        )

    def _tail_weights(self) -> TailWeights:
        return tail_weights(self.self_attn, self.norms.middle, self.gated_mlp)

    def _projection(self) -> Projection:
        qkv_proj = self.self_attn.qkv_proj
        return Projection(self.norms.input.weight, qkv_proj.plain, qkv_proj.bias)

    def forward_compiled(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """The same layer through torch.compile, but for attention."""
        tensors = self._tensors()
        if hidden.dim() == 3:  # parts, of a layer before that was not compiled
            hidden = hidden.sum(0).to(tensors.out.weight.dtype)
        qkv, stream = compiled(before_attention)(hidden, residual, tensors)
        heads = self.self_attn.attend(positions, qkv, batch)
        if not isinstance(self.mlp, SparseMLP):
            added, stream = compiled(after_attention)(heads, stream, tensors)
            return added, stream
        read, stream = compiled(behind_attention)(heads, stream, tensors)
        added = self.mlp(read)
        return added if self.mlp_out_norm is None else self.mlp_out_norm(added), stream

    def _tensors(self) -> LayerTensors:
        spec, attention, mlp = self.spec, self.self_attn, self.mlp
        dense = None if isinstance(mlp, SparseMLP) else mlp
        return LayerTensors(
            input_norm=NormWeights.of(self.input_layernorm),
            attention_out_norm=NormWeights.of(self.attention_out_norm),
            middle_norm=NormWeights.of(self.post_attention_layernorm),
            mlp_out_norm=NormWeights.of(self.mlp_out_norm),
            qkv=LinearWeights.of(attention.qkv_proj),
            out=LinearWeights.of(attention.o_proj),
            up=None if dense is None else LinearWeights.of(dense.up),
            down=None if dense is None else LinearWeights.of(dense.down_proj),
            activation=spec.activation,
            is_gated=spec.gated_mlp,
            is_shared=spec.norm_places == "shared",
            stream_scale=spec.residual_multiplier,
        )

    def forward_few_rows(
        self, positions: Tensor, stream: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """The same layer in one kernel a weight: residual stream in; out as of `forward`."""
        attention = self.self_attn
        norm, qkv_proj = self.norms.input, attention.qkv_proj
        qkv = few_row.norm_linear(stream, norm.weight, norm.eps, qkv_proj.plain, qkv_proj.bias)
        heads = attention.attend(positions, qkv, batch)
        stream = attention.o_proj.add_few_rows(heads, stream)
        mlp = self.mlp if isinstance(self.mlp, SparseMLP) else self.gated_mlp
        return mlp.few_rows(stream, self.norms.middle)
