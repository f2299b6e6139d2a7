"""All decoder layers of a small model in one kernel, where model, rows and batch allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from specengine.kernels import decoder_stack
from specengine.kernels.decoder_stack import LayerWeights, StackKV, StackShape, StackWeights

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch
    from specengine.layers.decoder import DecoderLayer, DecoderShape
    from specengine.layers.rotary import RotaryEmbedding


class WholeStack:
    """Layers of one shape without biases, norms of q and k, or windows."""

    def __init__(
        self, layers: Sequence[DecoderLayer], shape: DecoderShape, rotary: RotaryEmbedding
    ) -> None:
        self.layers = layers
        self.rotary = rotary
        self.eps = shape.rms_norm_eps
        self.shape = StackShape(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            len(layers),
        )
        has_bias = shape.qkv_bias or shape.o_bias or shape.mlp_bias
        has_window = any(layer.self_attn.attn.sliding_window is not None for layer in layers)
        is_whole_head = rotary.cos_sin_cache.shape[1] == shape.head_dim
        self.is_plain = is_whole_head and not (has_bias or has_window or shape.qk_norm)

    def run(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | None:
        """[T, H], the stream before the first layer -> behind the last. Outputs of
        batch.capture_layers are left on the batch. None, and nothing done, where layers have to run
        one by one."""
        is_packed = self.layers[0].self_attn.o_proj.kernel is not None
        if not len(hidden) or not self.is_plain or is_packed or batch.compiles:
            return None
        paged = batch.attn_backend.paged_batch(batch)
        if paged is None or not decoder_stack.fits(hidden, self.shape, paged):
            return None
        attention = [layer.self_attn.attn for layer in self.layers]
        buffers = [batch.token_to_kv_pool.get_kv_buffer(one.layer_id) for one in attention]
        kv = StackKV([k for k, _ in buffers], [v for _, v in buffers], batch.out_cache_loc)
        out = decoder_stack.decoder_stack(
            hidden, self._weights(attention[0].scale), kv, paged, batch.capture_layers
        )
        batch.captured.extend(out.captured)
        return out.stream

    def _weights(self, scale: float) -> StackWeights:
        layers = [
            LayerWeights(
                input_gain=layer.input_layernorm.weight,
                qkv=layer.self_attn.qkv_proj.plain,
                out=layer.self_attn.o_proj.plain,
                gain=layer.post_attention_layernorm.weight,
                gate_up=layer.mlp.gate_up_proj.plain,
                down=layer.mlp.down_proj.plain,
            )
            for layer in self.layers
        ]
        return StackWeights(self.shape, layers, self.rotary.cos_sin_cache, self.eps, scale)
