"""The decoder layer that target models and drafters share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specengine.kernels.linear import few_row, layer_tail
from specengine.kernels.linear.types import Projection, Tail, TailWeights
from specengine.kernels.opaque import is_traced
from specengine.layers.compiled import (
    LayerTensors,
    LinearWeights,
    NormWeights,
    after_attention,
    before_attention,
    behind_attention,
    compiled,
)
from specengine.layers.compute_paths import COMPILED, FEW_ROWS, LAYER_TAIL, PLAIN
from specengine.layers.gated_delta import GatedDelta
from specengine.layers.latent_attention import LatentAttention
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import Linear
from specengine.layers.mlp import FeedForward, GatedMLP
from specengine.layers.module import Module
from specengine.layers.norm import NORM_PLACES, Norm, PreNorms, RMSNorm, make_norm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import ProjectedAttention, SelfAttention
from specengine.layers.sparse_mlp import SparseMLP, feed_forward

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


def tail_weights(attention: ProjectedAttention, norm: RMSNorm, mlp: GatedMLP) -> TailWeights:
    """The weights behind attention in a layer without biases there, unpacked."""
    return TailWeights(
        attention.o_proj.plain, norm.weight, mlp.gate_up_proj.plain, mlp.down_proj.plain
    )


def products(
    attention: ProjectedAttention | GatedDelta, mlp: FeedForward | SparseMLP
) -> tuple[Linear, ...]:
    """Those of a layer whose plain weights the fused paths read: all but those of a mixture of
    experts, which every path leaves to it."""
    parts = *attention.children(), *(mlp.children() if isinstance(mlp, FeedForward) else ())
    return tuple(one for one in parts if isinstance(one, Linear))


def make_attention(
    spec: LayerSpec, layer_id: int, rotary: RotaryEmbedding
) -> ProjectedAttention | GatedDelta:
    """What a layer's description asks for. A further kind is one more line here."""
    if spec.gated_delta is not None:
        return GatedDelta(spec, layer_id)
    if spec.latent is not None:
        return LatentAttention(spec, spec.latent, layer_id, rotary)
    return SelfAttention(spec, layer_id, rotary)


class DecoderLayer(Module):
    """Attention, or linear attention, and feed-forward, with norms where the description has them.
    The residual stream is carried beside the layer's output and added inside the next norm.

    The layer's attention is an attribute under its own module_name, and `attention`. Fused paths
    read self_attn, the name of every ProjectedAttention.
    input_layernorm and post_attention_layernorm are before attention and before feed-forward,
    attention_out_norm and mlp_out_norm behind them; those that a layer lacks are None.
    """

    self_attn: ProjectedAttention

    def __init__(self, spec: LayerSpec, layer_id: int, rotary: RotaryEmbedding) -> None:
        """Raises ModelLoadError for a layer that is described with what nothing computes."""
        super().__init__()
        PLAIN.require(spec)
        self.spec = spec
        places = NORM_PLACES[spec.norm_places]
        self.input_layernorm = self._norm(spec.stream_eps, places.before)
        attention = make_attention(spec, layer_id, rotary)
        self._attention_name = attention.module_name
        setattr(self, self._attention_name, attention)
        self._side_by_side = places.side_by_side
        self.attention_out_norm = self._norm(spec.rms_norm_eps, places.behind)
        self.post_attention_layernorm = self._norm(spec.stream_eps, places.between)
        self.mlp = feed_forward(spec)
        self.mlp_out_norm = self._norm(spec.rms_norm_eps, places.behind)
        self._products = products(attention, self.mlp)
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
        if batch.compiles and not is_traced() and self._takes_compiled and self.is_plain:
            return self.forward_compiled(positions, hidden, residual, batch)
        stream = hidden if residual is None else residual
        few_rows = self._takes_few_rows and not batch.compiles
        if few_rows and few_row.fits(stream, self.num_weights) and self.is_plain:
            first, normed = self.norms.input, None
            if residual is not None and hidden.dim() == 3:  # what adds up the parts gives both
                normed, stream = first.add(hidden, residual)
            else:
                stream = first.stream(hidden, residual)
            return self.forward_few_rows(positions, stream, batch, normed)
        hidden, residual = self._read(hidden, residual)
        if self._side_by_side:
            attended, own = self.attention(positions, hidden, batch), self.post_attention_layernorm
            read = hidden if own is None else own(residual)
            return attended + self.mlp(read), residual
        if self.attention_out_norm is None:
            heads = self.attention.parts(positions, hidden, batch)
        else:
            heads = self.attention_out_norm(self.attention(positions, hidden, batch))
        return self._behind_attention(heads, residual)

    @property
    def leaves_rows_out(self) -> bool:
        """Whether `forward_last` computes what this layer is."""
        return self.attention.leaves_rows_out and not self._side_by_side

    def forward_last(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Output of the layer for the R rows batch.kept_rows alone, and the residual stream before
        it is added: both [R, hidden_size], or the first in parts. K and V of every row are
        written."""
        assert batch.kept_rows is not None
        attention, norm = self.self_attn, self.attention_out_norm
        hidden, residual = self._read(hidden, residual)
        heads = attention.attend_kept(positions, hidden, batch)
        out = attention.o_proj.parts(heads) if norm is None else norm(attention.o_proj(heads))
        return self._behind_attention(out, residual.index_select(0, batch.kept_rows))

    def _read(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What attention reads, and the stream."""
        norm = self.input_layernorm
        if norm is None:
            return self._enter(hidden, residual)
        return norm.add(hidden, residual, self.attention.takes, self._is_awaited)

    def _behind_attention(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Feed-forward, of what attention gave, perhaps in parts, and the stream before it."""
        norm = self.post_attention_layernorm
        hidden, residual = (
            self._enter(attended, residual)
            if norm is None
            else norm.add(attended, residual, self.mlp.takes, self.mlp.waits)
        )
        if self.mlp_out_norm is None:
            return self.mlp.parts(hidden), residual
        return self.mlp_out_norm(self.mlp(hidden)), residual

    def _enter(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Without a norm before it: what attention or feed-forward reads, and the stream, both
        [T, hidden_size]."""
        stream = hidden if residual is None else hidden + residual
        return self.spec.true_stream(stream), stream

    @property
    def _is_awaited(self) -> bool:
        """Of the first norm's rows: side by side, feed-forward reads them, too."""
        return self.attention.waits and not self._side_by_side

    @property
    def attention(self) -> ProjectedAttention | GatedDelta:
        found: ProjectedAttention | GatedDelta = getattr(self, self._attention_name)
        return found

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
        return all(one.is_plain for one in self._products)

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
        """Runs the layer with all behind attention in one kernel, which goes on to the projection
        of the following layer. before: the stream, and this layer's projection, if that was made.
        """
        qkv, norm = before.qkv, self.norms.input
        if qkv is None:
            qkv = self.self_attn.in_proj(norm(before.stream))
        heads = self.self_attn.attend(positions, qkv, batch)
        projection = None if following is None else following._projection()
        return layer_tail.layer_tail(
            heads, before.stream, self._tail_weights(), norm.eps, projection
        )

    def _tail_weights(self) -> TailWeights:
        return tail_weights(self.self_attn, self.norms.middle, self.gated_mlp)

    def _projection(self) -> Projection:
        in_proj = self.self_attn.in_proj
        return Projection(self.norms.input.weight, in_proj.plain, in_proj.bias)

    def forward_compiled(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Output of the layer [T, hidden_size], perhaps in parts, and the residual stream before it
        is added, by torch.compile but for attention."""
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
            qkv=LinearWeights.of(attention.in_proj),
            out=LinearWeights.of(attention.o_proj),
            up=None if dense is None else LinearWeights.of(dense.up),
            down=None if dense is None else LinearWeights.of(dense.down_proj),
            activation=spec.activation,
            is_gated=spec.gated_mlp,
            side_by_side=self._side_by_side,
            stream_scale=spec.residual_multiplier,
        )

    def forward_few_rows(
        self, positions: Tensor, stream: Tensor, batch: ForwardBatch, normed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the layer and the residual stream, as `forward` gives them, by one kernel a
        weight. stream: [T, hidden_size], the residual stream; normed: the same behind the first
        norm, where that is known."""
        attention = self.self_attn
        norm, in_proj = self.norms.input, attention.in_proj
        if normed is None:
            qkv = few_row.norm_linear(stream, norm.weight, norm.eps, in_proj.plain, in_proj.bias)
        else:
            qkv = few_row.linear(normed, in_proj.plain, in_proj.bias)
        heads = attention.attend(positions, qkv, batch)
        stream = attention.o_proj.add_few_rows(heads, stream)
        mlp = self.mlp if isinstance(self.mlp, SparseMLP) else self.gated_mlp
        return mlp.few_rows(stream, self.norms.middle)
