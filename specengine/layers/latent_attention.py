"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token leaves one compressed vector c for keys and values of all heads, and one rotated key r::

    k[h] = (U_K[h] c, r)      v[h] = U_V[h] c      score = q_nope[h] . U_K[h] c + q_rope[h] . r

Two forms give the same. *Absorbed*: q_nope[h] is multiplied by U_K[h] first, so that all heads read
the one key (c, r), and c is also its value; U_V[h] follows the sum. *Expanded*: keys and values of
all heads are computed from c, which costs a product a key and less for each pair of query and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.core.parallel import Cut, even_heads
from specengine.kernels.attention.latent_store import latent_store
from specengine.kernels.attention.ragged_attention import ragged_attention
from specengine.kernels.attention.types import ExpandedHeads, Expansion
from specengine.kernels.kv.fp8_rows import read_rows
from specengine.kernels.opaque import is_traced
from specengine.layers import split_ops
from specengine.layers.attention import Attention
from specengine.layers.compute_paths import LATENT_ATTENTION
from specengine.layers.layer_spec import LatentSpec, LayerSpec
from specengine.layers.linear import ColumnParallelLinear, MergedLinear, RowParallelLinear
from specengine.layers.norm import RMSNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import ProjectedAttention

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


class UpProjection(ColumnParallelLinear):
    """U_K and U_V of the rank's heads, a head's rows together, U_K's first. They are multiplied
    head by head, which no packed or quantised form does."""

    keeps_plain = True


class LatentAttention(ProjectedAttention, split_ops.Numbered):
    """Projections are named as checkpoints name them; the first of q and that of c and r are one
    product. The form is chosen by the plan of the batch (`runner.attention.expansion`).

    A rank has some of the heads. All heads read the same c and r, which each rank computes and
    keeps; one sum over ranks follows o_proj."""

    def __init__(
        self, spec: LayerSpec, latent: LatentSpec, layer_id: int, rotary: RotaryEmbedding
    ) -> None:
        """Raises ModelLoadError for a layer that is described with what this does not compute,
        ConfigError for fewer heads than ranks."""
        super().__init__()
        LATENT_ATTENTION.require(spec)
        spec.check_ranks()
        heads = even_heads(spec.num_heads)
        self.latent, self.num_heads, self.rotary = latent, heads.size, rotary
        queries, kept = heads.times(spec.head_dim), Cut(0, 0, latent.kept_dim, latent.kept_dim)
        first = queries if latent.q_rank is None else Cut(0, 0, latent.q_rank, latent.q_rank)
        self.sizes = [first.size, kept.size]
        self.in_name = (
            "q_kv_a_proj_with_mqa" if latent.q_rank is None else "fused_qkv_a_proj_with_mqa"
        )
        parts = [first, kept]
        in_proj = MergedLinear(spec.hidden_size, self.sizes, spec.qkv_bias, parts)
        self.add_module(self.in_name, in_proj)
        self.q_a_layernorm = self.q_b_proj = None
        if latent.q_rank is not None:
            self.q_a_layernorm = RMSNorm(latent.q_rank, latent.norm_eps)
            self.q_b_proj = ColumnParallelLinear(latent.q_rank, queries)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, latent.norm_eps)
        per_head = latent.nope_dim + latent.value_dim
        self.kv_b_proj = UpProjection(latent.kv_rank, heads.times(per_head))
        values = heads.times(latent.value_dim)
        self.o_proj = RowParallelLinear(values.whole, spec.hidden_size, spec.o_bias, values)
        self.attn = Attention(
            self.num_heads,
            latent.kept_dim,
            spec.attention_scale,
            num_kv_heads=1,
            layer_id=layer_id,
            rotary=rotary,
            value_dim=latent.kv_rank,
            expanded=ExpandedHeads(spec.head_dim, latent.value_dim),
        )

    @property
    def in_proj(self) -> MergedLinear:
        found = self.get_submodule(self.in_name)
        assert isinstance(found, MergedLinear)
        return found

    @property
    def up(self) -> Tensor:
        """[num_heads, nope_dim + value_dim, kv_rank]"""
        return self.kv_b_proj.plain.view(self.num_heads, -1, self.latent.kv_rank)

    def attend(self, positions: Tensor, projected: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], [T, sum(sizes)] -> [T, num_heads * value_dim]."""
        q, compressed = torch.split(projected, self.sizes, dim=-1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        if is_traced():
            width = self.num_heads * self.latent.value_dim
            return split_ops.LATENT_ATTENTION(self, (q, compressed), (width,), q.dtype)
        return self._attend(positions, q, compressed, batch)

    def run_split(self, rows: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """What follows the projections, of a model that was traced."""
        q, compressed = rows
        return self._attend(batch.positions, q, compressed, batch)

    def _attend(
        self, positions: Tensor, q: Tensor, compressed: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Queries of all heads, c and r -> [T, num_heads * value_dim]."""
        if not len(q):  # an idle rank
            return q.new_empty(0, self.num_heads * self.latent.value_dim)
        heads = q.reshape(len(q), self.num_heads, -1)
        plan = batch.attn_plan
        if plan is not None and plan.expansion is not None:
            return self._expanded(positions, heads, compressed, plan.expansion, batch)
        return self._absorbed(positions, heads, compressed, batch)

    def _absorbed(
        self, positions: Tensor, q: Tensor, compressed: Tensor, batch: ForwardBatch
    ) -> Tensor:
        latent, up = self.latent, self.up
        rank, nope = latent.kv_rank, latent.nope_dim
        absorbed = q.new_empty(*q.shape[:2], latent.kept_dim)
        torch.bmm(
            q[..., :nope].transpose(0, 1), up[:, :nope], out=absorbed[..., :rank].transpose(0, 1)
        )
        self._store(positions, q, absorbed[..., rank:], compressed, batch)
        seen = self.attn.attend_stored(absorbed, batch)
        values = q.new_empty(*q.shape[:2], latent.value_dim)
        torch.bmm(seen.transpose(0, 1), up[:, nope:].transpose(1, 2), out=values.transpose(0, 1))
        return values.flatten(1)

    def _expanded(
        self,
        positions: Tensor,
        q: Tensor,
        compressed: Tensor,
        expansion: Expansion,
        batch: ForwardBatch,
    ) -> Tensor:
        assert batch.attn_plan is not None
        batch.attn_plan.check(batch)
        latent = self.latent
        rank, nope = latent.kv_rank, latent.nope_dim
        self._store(positions, q, q[..., nope:], compressed, batch)
        cache, _ = batch.token_to_kv_pool.get_kv_buffer(self.attn.layer_id)
        kept = read_rows(cache, expansion.slots, q.dtype)
        both = F.linear(kept[:, 0, :rank], self.kv_b_proj.plain)
        heads = both.view(len(kept), self.num_heads, -1)
        rotated = kept[..., rank:].expand(-1, self.num_heads, -1)
        k, v = torch.cat((heads[..., :nope], rotated), -1), heads[..., nope:]
        return ragged_attention(q, k, v, expansion.spans, self.attn.scale).flatten(1)

    def _store(
        self, positions: Tensor, q: Tensor, rotated: Tensor, compressed: Tensor, batch: ForwardBatch
    ) -> None:
        """Normed c and rotated r go to the batch's slots, rotated parts of q to `rotated`."""
        cache, _ = batch.token_to_kv_pool.get_kv_buffer(self.attn.layer_id)
        norm = self.kv_a_layernorm
        latent_store(
            q[..., self.latent.nope_dim :],
            compressed,
            norm.weight,
            norm.eps,
            positions,
            self.rotary.cos_sin_cache,
            self.latent.has_pairs,
            rotated,
            cache,
            batch.out_cache_loc,
        )
