"""A decoder layer of EAGLE's drafts, and the options by which checkpoints differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specengine.kernels.linear import few_row, layer_tail
from specengine.layers.compute_paths import DRAFT_LAYER, FEW_ROWS, LAYER_TAIL, log_refusals
from specengine.layers.decoder import products, tail_weights
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.mlp import GatedMLP
from specengine.layers.module import Module
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import SelfAttention

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


@dataclass(frozen=True)
class EagleForm:
    """What checkpoints of one family have or lack. `config` is that of the decoder layer."""

    config: Any
    spec: LayerSpec
    target_vocab_size: int
    draft_vocab_size: int
    feature_size: int  # of the target: hidden size, times the number of layers in EAGLE-3
    has_embed_tokens: bool = False  # else the target's
    has_lm_head: bool = False  # else the target's
    # Of each layer, tokens that a query sees; None is all. Layers past the first are plain ones.
    windows: tuple[int | None, ...] = (None,)
    has_fc: bool = True  # EAGLE-3: without it, one feature goes in as it is
    has_fc_bias: bool = False
    has_embed_norm: bool = False  # EAGLE of speculators: of embeddings, before fc
    has_output_norm: bool = False  # EAGLE of speculators: of states, before the head
    has_input_layernorm: bool = False  # EAGLE: the original has none
    num_fc_norms: int = 0  # EAGLE-3: a norm for each layer's feature
    has_joint_norm: bool = False  # EAGLE-3: one norm over all features together
    norm_before_residual: bool = False  # EAGLE-3: the residual stream starts normed
    norm_output: bool = False  # EAGLE-3: the next step continues the normed state
    # int64 [draft_vocab_size], ascending: what it may say, of a draft whose files have all tokens
    token_map: Tensor | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def has_own_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.target_vocab_size


class Way(Enum):
    """How a layer runs its rows."""

    TAIL = auto()  # all behind attention in one kernel
    FEW_ROWS = auto()  # a kernel a weight
    PLAIN = auto()


class EagleLayer(Module):
    """A decoder layer whose attention reads something else than the residual stream."""

    def __init__(
        self,
        form: EagleForm,
        input_size: int,
        input_layernorm: RMSNorm | None,
        hidden_norm: RMSNorm | None = None,
        layer_id: int = 0,
    ) -> None:
        """input_size: of what attention reads. The norms before it are the caller's.
        layer_id: of the draft's layers, from 0."""
        super().__init__()
        self.is_last = layer_id == form.num_layers - 1
        spec = replace(form.spec, sliding_window=form.windows[layer_id])
        DRAFT_LAYER.require(spec)
        self.input_layernorm = input_layernorm
        self.hidden_norm = hidden_norm
        rotary = RotaryEmbedding.from_config(form.config, *spec.rotary_table)
        self.self_attn = SelfAttention(spec, layer_id, rotary, input_size=input_size)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
        self._products = products(self.self_attn, self.mlp)
        self.num_weights = spec.num_weights(input_size)
        self._takes_few_rows = FEW_ROWS.takes(spec)
        self._takes_tail = LAYER_TAIL.takes(spec)
        log_refusals((FEW_ROWS, LAYER_TAIL), [spec], self.self_attn.o_proj.device)

    def forward(
        self, positions: Tensor, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """What attention reads [T, input_size] and the stream [T, H] -> the stream, [T, H], or
        [R, H] where batch.kept_rows says so. Layers above read every row of this one, so the last
        layer alone leaves rows out."""
        attention, kept_R = self.self_attn, batch.kept_rows if self.is_last else None
        if kept_R is not None and batch.last is not None and attention.attends_last:
            heads = attention.attend_last(positions, attended, batch)
            residual = residual.index_select(0, kept_R)
            return self._behind_attention(heads, residual, self._way_of(residual))
        way = self._way_of(residual)
        if way is Way.FEW_ROWS:
            qkv = few_row.linear(attended, attention.qkv_proj.plain, attention.qkv_proj.bias)
        else:
            qkv = attention.qkv_proj.forward(attended)
        heads = attention.attend(positions, qkv, batch)
        if kept_R is not None:
            heads, residual = heads.index_select(0, kept_R), residual.index_select(0, kept_R)
            way = self._way_of(residual)
        return self._behind_attention(heads, residual, way)

    def _behind_attention(self, heads: Tensor, stream: Tensor, way: Way) -> Tensor:
        """[R, num_heads * head_dim] and [R, H] -> the stream, [R, H]."""
        attention, mlp, norm = self.self_attn, self.mlp, self.post_attention_layernorm
        if way is Way.TAIL:
            weights = tail_weights(attention, norm, mlp)
            return layer_tail.layer_tail(heads, stream, weights, norm.eps).stream
        if way is Way.FEW_ROWS:
            stream = attention.o_proj.add_few_rows(heads, stream)
            gate_up = mlp.gate_up_proj.plain
            gated = few_row.norm_gated_linear(stream, norm.weight, norm.eps, gate_up)
            return mlp.down_proj.add_few_rows(gated, stream)
        normed, stream = norm.add(attention.o_proj.parts(heads), stream, mlp.takes)
        return mlp.forward(normed) + stream

    def _way_of(self, stream: Tensor) -> Way:
        """The way for rows [T, H]."""
        if not all(one.is_plain for one in self._products):
            return Way.PLAIN
        if self._takes_tail:
            weights = tail_weights(self.self_attn, self.post_attention_layernorm, self.mlp)
            if layer_tail.fits(stream, weights):
                return Way.TAIL
        few_rows = self._takes_few_rows and few_row.fits(stream, self.num_weights)
        return Way.FEW_ROWS if few_rows else Way.PLAIN


# What other layouts call parts of a draft: speculators in words of its own for EAGLE, and the code
# that trained what it converts in others still.
_OTHER_NAMES = (
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("embedding_layernorm.", "embed_norm."),
    ("embed_layernorm.", "embed_norm."),
    ("hidden_layernorm.", "layers.0.input_layernorm."),
    ("pre_lm_head_layernorm.", "output_norm."),
    ("lm_head_layernorm.", "output_norm."),
)


def parameter_name(name: str) -> str:
    """A checkpoint's tensor as it is called here."""
    name = name.removeprefix("model.")
    for other, ours in _OTHER_NAMES:
        if name.startswith(other):
            return ours + name.removeprefix(other)
    return name
