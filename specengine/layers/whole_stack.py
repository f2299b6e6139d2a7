"""All decoder layers of a small model in one kernel, where model, rows and batch allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from specengine.kernels.linear import decoder_stack
from specengine.kernels.linear.types import LayerWeights, StackKV, StackShape, StackWeights
from specengine.layers.compute_paths import WHOLE_STACK

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch
    from specengine.layers.decoder import DecoderLayer
    from specengine.layers.rotary import RotaryEmbedding


class WholeStack:
    """Layers of one description, which the kernel computes."""

    def __init__(self, layers: Sequence[DecoderLayer], rotary: RotaryEmbedding) -> None:
        spec = layers[0].spec
        self.layers = layers
        self.rotary = rotary
        self.spec = spec
        self.shape = StackShape(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            len(layers),
        )
        self.takes_layers = WHOLE_STACK.takes(spec) and all(one.spec == spec for one in layers)

    def run(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | None:
        """[T, H], the stream before the first layer -> behind the last. Outputs of
        batch.feature_layers are left on the batch. None, and nothing done, where layers have to run
        one by one."""
        if not len(hidden) or not self.takes_layers or batch.compiles:
            return None
        if not all(layer.is_plain for layer in self.layers):
            return None
        paged = batch.attn_backend.paged_batch(batch)
        if paged is None or not decoder_stack.fits(hidden, self.shape, paged):
            return None
        attention = [layer.self_attn.attn for layer in self.layers]
        buffers = [batch.token_to_kv_pool.get_kv_buffer(one.layer_id) for one in attention]
        if buffers[0][0].dtype != hidden.dtype:  # KV in FP8
            return None
        kv = StackKV([k for k, _ in buffers], [v for _, v in buffers], batch.out_cache_loc)
        out = decoder_stack.decoder_stack(hidden, self._weights(), kv, paged, batch.feature_layers)
        batch.layer_features.extend(map(self.spec.true_stream, out.layer_features))
        return out.stream

    def _weights(self) -> StackWeights:
        layers = [
            LayerWeights(
                input_gain=layer.norms.input.weight,
                qkv=layer.self_attn.in_proj.plain,
                out=layer.self_attn.o_proj.plain,
                gain=layer.norms.middle.weight,
                gate_up=layer.gated_mlp.gate_up_proj.plain,
                down=layer.gated_mlp.down_proj.plain,
            )
            for layer in self.layers
        ]
        spec, angles = self.spec, self.rotary.cos_sin_cache
        return StackWeights(self.shape, layers, angles, spec.stream_eps, spec.attention_scale)
