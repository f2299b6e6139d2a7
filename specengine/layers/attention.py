"""Attention of a decoder layer, over paged KV."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from specengine.core.batch import ForwardBatch
from specengine.core.errors import ModelLoadError, PlanMismatchError
from specengine.core.interfaces import Rotary
from specengine.kernels.attention.head_norms import norm_heads
from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.attention.types import ExpandedHeads, HeadNorms
from specengine.kernels.opaque import is_traced
from specengine.layers import split_ops


def attention_layers(model: object) -> tuple[Attention, ...]:
    """Those of a model, in the order in which a forward comes to them."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [module for module in modules if isinstance(module, Attention)]
    return tuple(sorted(layers, key=lambda layer: layer.layer_id))


class Attention(split_ops.Numbered):
    """Rotates q and k, writes k and v to the batch's slots, attends through the batch's backend.

    Holds no weights of its own. `sliding_window`: a query at position p sees positions above
    p - window. `attention_chunk`: it sees those of its own chunk of so many positions.
    `softcap`: scores are softcap * tanh(score / softcap). `sinks`: [num_heads], a further logit of
    each head's softmax, which has no value (Xiao et al. 2023; gpt-oss learns it). `value_dim`: V is
    the first value_dim numbers of K, which the layer that projects them writes (`attend_stored`);
    `expanded`: the heads that they stand for.
    """

    sinks: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float,
        num_kv_heads: int,
        layer_id: int,
        rotary: Rotary | None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        value_dim: int | None = None,
        expanded: ExpandedHeads | None = None,
        attention_chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.rotary = rotary
        self.sliding_window = sliding_window
        self.attention_chunk = attention_chunk
        self.softcap = softcap
        self.sinks = sinks
        self.value_dim = value_dim
        self.expanded = expanded
        self.k_scale = self.v_scale = 1.0

    def use_kv_scales(self, k_scale: float, v_scale: float) -> None:
        """K and V are kept divided by these, in FP8. Of K, the scores' scale takes the scale back;
        of V, the output does."""
        if self.value_dim is not None and (k_scale, v_scale) != (1.0, 1.0):
            raise ModelLoadError("scales of latents in FP8 are not supported")
        self.scale *= k_scale / self.k_scale
        self.k_scale, self.v_scale = k_scale, v_scale

    def forward(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """positions int64 [T]; q [T, num_heads * head_dim]; k, v [T, num_kv_heads * head_dim] ->
        [T, num_heads * head_dim]. norms: of the heads of q and k, before any rotation here; none in
        a trace. Zero tokens need no plan. Raises PlanMismatchError where the batch's attention plan
        is missing or was made for another batch."""
        if is_traced():
            assert norms is None, "a traced model normalises heads before"
            return split_ops.ATTENTION(self, (q, k, v), q.shape[1:], q.dtype)
        if q.shape[0] == 0:
            return q.new_empty(q.shape)
        _check_plan(batch)
        q_heads = q.view(-1, self.num_heads, self.head_dim)
        k_heads = k.view(-1, self.num_kv_heads, self.head_dim)
        v_heads = v.view(-1, self.num_kv_heads, self.head_dim)
        if self.v_scale != 1.0:
            v_heads = v_heads / self.v_scale
        if self.k_scale != 1.0:
            if norms is not None:
                (q_heads, k_heads), norms = norm_heads(q_heads, k_heads, norms), None
            k_heads = k_heads / self.k_scale
        out = batch.attn_backend.forward_fused(q_heads, k_heads, v_heads, self, batch, norms)
        if out is None:
            if norms is not None:
                q_heads, k_heads = norm_heads(q_heads, k_heads, norms)
            out = self._forward_in_steps(positions, q_heads, k_heads, v_heads, batch)
        out = out.reshape(q.shape)
        return out if self.v_scale == 1.0 else out * self.v_scale

    def run_split(self, rows: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """`forward`, of a model that was traced."""
        q, k, v = rows
        return self.forward(batch.positions, q, k, v, batch)

    def _forward_in_steps(
        self, positions: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch
    ) -> Tensor:
        k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(self.layer_id)
        angles = None if self.rotary is None else self.rotary.cos_sin_cache
        rotated = rope_store_kv(q, k, v, positions, angles, k_cache, v_cache, batch.out_cache_loc)
        return self._attend(rotated, batch)

    def store(self, positions: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Rotate k and write k and v, [T, num_kv_heads * head_dim], to the batch's slots."""
        if k.shape[0] == 0:
            return
        shape = (-1, self.num_kv_heads, self.head_dim)
        k_heads, v_heads = (k / self.k_scale).view(shape), (v / self.v_scale).view(shape)
        caches = batch.token_to_kv_pool.get_kv_buffer(self.layer_id)
        angles = None if self.rotary is None else self.rotary.cos_sin_cache
        # The queries that the operation rotates beside are these keys, and go nowhere.
        rope_store_kv(
            k_heads.clone(), k_heads, v_heads, positions, angles, *caches, batch.out_cache_loc
        )

    def attend_stored(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        """The last step alone, of rotated queries [T, num_heads, head_dim] whose keys and values
        are in the batch's slots -> [T, num_heads, value_dim or head_dim]."""
        if q.shape[0] == 0:
            return q.new_empty(*q.shape[:2], self.value_dim or self.head_dim)
        _check_plan(batch)
        return self._attend(q, batch)

    def _attend(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.forward_mode.is_decode():
            return batch.attn_backend.forward_decode(q, self, batch)
        return batch.attn_backend.forward_extend(q, self, batch)


def _check_plan(batch: ForwardBatch) -> None:
    if batch.attn_plan is None:
        raise PlanMismatchError("the batch carries no attention plan; plan it first")
    batch.attn_plan.check(batch)
