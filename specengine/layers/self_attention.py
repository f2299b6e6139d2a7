"""Attention of a decoder layer with its projections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.core.parallel import Cut, communicator, head_cuts
from specengine.kernels.attention.rope import rotate_heads
from specengine.kernels.attention.types import HeadNorms
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.sigmoid_gate import sigmoid_gate
from specengine.kernels.opaque import is_traced
from specengine.layers.attention import Attention
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import MergedLinear, RowParallelLinear
from specengine.layers.module import Module
from specengine.layers.norm import HeadNorm, Norm, PartNorm, RMSNorm, make_norm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.split_ops import sum_over

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch

# Merged projections of a layer -> their parts in checkpoints.
PACKED_MODULES: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    # of latent attention, whose q is compressed, or not
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_kv_a_proj_with_mqa": ("q_proj", "kv_a_proj_with_mqa"),
}


class ProjectedAttention(Module):
    """What fused paths compute the surroundings of: one product of the layer's input, then
    `attend`, then `o_proj`. sizes: of the product's parts."""

    module_name = "self_attn"  # in its layer, as checkpoints name it
    leaves_rows_out = True  # it has `attend_kept`
    sizes: list[int]
    o_proj: RowParallelLinear
    attn: Attention

    @property
    @abstractmethod
    def in_proj(self) -> MergedLinear:
        """The product of the layer's input."""

    @property
    def takes(self) -> Fp8Input | None:
        """As layers.linear.Linear has it: of the layer's input."""
        return self.in_proj.takes

    @property
    def waits(self) -> bool:
        """As layers.linear.Linear has it: what reads the layer's input."""
        return self.in_proj.waits

    @abstractmethod
    def attend(self, positions: Tensor, projected: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, sum(sizes)] -> what o_proj reads, [T, heads' outputs side by side]."""

    def attend_kept(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> what o_proj reads of the rows batch.kept_rows, [R, heads' outputs
        side by side]. K and V of every row are written."""
        assert batch.kept_rows is not None
        heads = self.attend(positions, self.in_proj.forward(hidden), batch)
        return heads.index_select(0, batch.kept_rows)

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, hidden_size] -> [T, hidden_size]."""
        return self.o_proj.forward(self.attend(positions, self.in_proj.forward(hidden), batch))

    def parts(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The same, perhaps in parts, for RMSNorm.add."""
        return self.o_proj.parts(self.attend(positions, self.in_proj.forward(hidden), batch))


class SelfAttention(ProjectedAttention):
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
        rotates_first = spec.has_rotary and spec.qk_norm_rotated
        self.rotary = rotary if rotates_first else None  # before the norms; None: `attn` does
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
            rotary if spec.has_rotary and not rotates_first else None,
            spec.sliding_window,
            spec.attention_softcap,
            self.sinks,
            attention_chunk=spec.attention_chunk,
        )

    def _qk_norms(self, spec: LayerSpec) -> tuple[Norm | None, Norm | None]:
        """Norms of each head, or of all heads of q and all of k together."""
        q_size, k_size, _ = self.sizes if spec.qk_norm_whole else [spec.head_dim] * 3
        eps = spec.rms_norm_eps
        if spec.qk_norm_by_head:
            each = spec.head_dim, eps, spec.norm_offset
            return HeadNorm(self.heads.q, *each), HeadNorm(self.heads.kv, *each)
        if not (spec.qk_norm or spec.qk_norm_whole or spec.qk_norm_rotated):
            return None, None
        if spec.qk_norm_whole and self.ranks.size > 1:
            q, kv = (one.times(spec.head_dim) for one in (self.heads.q, self.heads.kv))
            copies = max(self.ranks.size // spec.num_kv_heads, 1)
            given = eps, spec.norm_offset
            return PartNorm(q, 1, *given), PartNorm(kv, copies, *given)
        return make_norm(spec, q_size, eps), make_norm(spec, k_size, eps)

    def attend(self, positions: Tensor, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, q + k + v] -> the heads' outputs, [T, num_heads * head_dim]."""
        q, k, v = torch.split(qkv, self.sizes, dim=-1)
        if self.has_gate:
            pairs = q.view(len(q), self.attn.num_heads, 2 * self.head_dim).chunk(2, -1)
            q, gate = pairs[0].flatten(1), pairs[1]
        if self.rotary is not None:
            q, k = self._rotated(positions, q, k, self.rotary)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self._norms_of_attention(self.q_norm, self.k_norm)
            if norms is None:
                q, k = self._normed(q, self.q_norm, k, self.k_norm)
        if self.temperature is not None:
            q = self.temperature.scaled(q, positions)
        out = self.attn.forward(positions, q, k, v, batch, norms)
        return sigmoid_gate(out, gate, into=self.o_proj.takes) if self.has_gate else out

    def _rotated(
        self, positions: Tensor, q: Tensor, k: Tensor, rotary: RotaryEmbedding
    ) -> tuple[Tensor, Tensor]:
        q_heads = q.view(len(q), self.attn.num_heads, self.head_dim)
        k_heads = k.view(len(k), self.attn.num_kv_heads, self.head_dim)
        q, k = rotate_heads(q_heads, k_heads, positions, rotary.cos_sin_cache)
        return q.flatten(1), k.flatten(1)

    def attend_kept(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.last is not None and self.attends_last:
            return self.attend_last(positions, hidden, batch)
        return super().attend_kept(positions, hidden, batch)

    @property
    def attends_last(self) -> bool:
        """Whether `attend_last` computes what this layer is."""
        plain_heads = self.q_norm is None and self.k_norm is None and not self.has_gate
        return plain_heads and self.temperature is None

    def attend_last(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """`attend` of the last row of each request alone, [T, input_size] -> [B, num_heads *
        head_dim]. K and V of all rows are written; queries of others are not even projected, where
        products are plain."""
        assert batch.last is not None
        last, rows_B = batch.last(batch), batch.kept_rows
        assert rows_B is not None
        size, proj = self.sizes[0], self.qkv_proj
        if proj.is_plain:
            bias = (None, None) if proj.bias is None else (proj.bias[:size], proj.bias[size:])
            q = F.linear(hidden.index_select(0, rows_B), proj.plain[:size], bias[0])
            kv = F.linear(hidden, proj.plain[size:], bias[1])
        else:
            q, kv = torch.split(proj.forward(hidden), [size, sum(self.sizes[1:])], dim=-1)
            q = q.index_select(0, rows_B)
        k, v = torch.split(kv, self.sizes[1:], dim=-1)
        self.attn.store(positions, k, v, batch)
        k, v = torch.split(kv.index_select(0, rows_B), self.sizes[1:], dim=-1)
        return self.attn.forward(last.positions, q, k, v, last)

    def _norms_of_attention(self, q_norm: Norm, k_norm: Norm) -> HeadNorms | None:
        """What `Attention.forward` normalises by: RMS norms of each head by itself, right before
        its rotation, or right before attention; None for every other norm."""
        if is_traced() or self.temperature is not None:
            return None
        if type(q_norm) is not RMSNorm or type(k_norm) is not RMSNorm or q_norm.eps != k_norm.eps:
            return None
        if not len(q_norm.weight) == len(k_norm.weight) == self.head_dim:
            return None
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)

    def _normed(self, q: Tensor, q_norm: Norm, k: Tensor, k_norm: Norm) -> tuple[Tensor, Tensor]:
        if isinstance(q_norm, PartNorm) and isinstance(k_norm, PartNorm):
            return self._normed_over_ranks(q, q_norm, k, k_norm)
        return q_norm.of_heads(q), k_norm.of_heads(k)

    def _normed_over_ranks(
        self, q: Tensor, q_norm: PartNorm, k: Tensor, k_norm: PartNorm
    ) -> tuple[Tensor, Tensor]:
        """By one sum over ranks."""
        sums_2T = sum_over(self.ranks, torch.stack([q_norm.squares(q), k_norm.squares(k)]))
        return q_norm.scaled(q, sums_2T[0]), k_norm.scaled(k, sums_2T[1])

    def cuts(self, kind: str) -> Sequence[Cut | None]:
        """As layers.linear.Linear has it: of the sinks."""
        return [self.heads.q]

    @property
    def in_proj(self) -> MergedLinear:
        return self.qkv_proj
