"""FlashInfer: paged wrappers that are planned on the host (Ye et al. 2025, arXiv:2501.01005)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, AttnPlan, ForwardBatch
from specengine.core.interfaces import AttentionLayer, AttentionLimits
from specengine.core.tree import Tree
from specengine.kernels.attention.pack_tree_mask import pack_tree_mask
from specengine.runner.attention.base import RegisteredBackend, attach_plan, require, require_cuda
from specengine.runner.attention.flashinfer_wrappers import (
    HostLengths,
    Wrapper,
    Wrappers,
    slots_of,
)


@dataclass(eq=False)
class TreeBits:
    """Which keys each row sees, one bit a key. Written in a forward's first layer, since the tree
    is not known earlier."""

    packed: Tensor  # uint8
    starts: Tensor  # int32 [B + 1], bytes
    most: int  # bytes of a request at most

    @classmethod
    def of(cls, batch: ForwardBatch, num_bytes: int, most: int) -> TreeBits:
        device = batch.seq_lens.device
        return cls(
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=device),
            most,
        )

    def write(self, batch: ForwardBatch, tree: Tree) -> None:
        sizes_B = (batch.extend_lens * batch.seq_lens + 7) // 8
        self.starts[1:].copy_(sizes_B.cumsum(0))
        pack_tree_mask(
            tree.mask_BNN.to(self.packed.device).contiguous(),
            batch.extend_lens,
            batch.seq_lens,
            self.starts[:-1],
            self.packed,
            self.most,
        )


@dataclass(eq=False)
class FlashInferPlan:
    wrapper: Wrapper
    bits: TreeBits | None


class FlashInferAttentionBackend(RegisteredBackend):
    """Every plan has its own wrapper, so that several may wait for their forwards. All forwards run
    on one stream; plans may be made on another (see WrapperPool).

    A plan is valid only for its lengths, in a graph too: every replay is planned.
    """

    name = "flashinfer"
    limits = AttentionLimits(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
        windows_under_trees=False,
        softcap=True,
        layers_alike=True,
        plans_on_host=True,
    )

    def __init__(self, device: torch.device) -> None:
        self.wrappers = Wrappers(device)

    @classmethod
    def for_device(cls, device: torch.device) -> AttentionBackend:
        require(find_spec("flashinfer") is not None, "flashinfer-python")
        require_cuda(device, "flashinfer")
        return cls(device)

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        pool = self.wrappers.pool(batch.forward_mode)
        plan = FlashInferPlan(pool.take(), _bits_of(batch))
        pool.lend(plan.wrapper, plan)
        lengths = HostLengths.of(batch)
        mask = None if plan.bits is None else plan.bits.packed
        _plan(plan, batch, lengths, slots_of(batch, lengths.num_keys), mask)
        if plan.bits is not None:
            # FlashInfer counts bits where its kernels count bytes (0.6.12).
            plan.wrapper.inner._mask_indptr_buf = plan.bits.starts
        return attach_plan(self.name, batch, plan)

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        bits = None
        if batch.tree is not None:
            context = batch.req_to_token_pool.req_to_token.shape[1]
            num_bytes = batch.num_tokens * context // 8 + batch.batch_size
            bits = TreeBits.of(batch, num_bytes, batch.max_extend_len * context // 8 + 1)
        nothing = torch.empty(0) if bits is None else bits.starts
        wrapper = self.wrappers.for_graph(batch, None if bits is None else bits.packed, nothing)
        plan, lengths = FlashInferPlan(wrapper, bits), HostLengths.of(batch)
        nowhere = torch.zeros(lengths.num_keys, dtype=torch.int32, device=self.wrappers.device)
        _plan(plan, batch, lengths, nowhere, mask=None)
        return attach_plan(self.name, batch, plan)

    def init_forward_metadata_replay(self, batch: ForwardBatch, plan: AttnPlan) -> None:
        lengths = HostLengths.of(batch)
        _plan(plan.metadata, batch, lengths, slots_of(batch, lengths.num_keys), mask=None)

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        plan: FlashInferPlan = batch.attn_plan.metadata
        if plan.bits is not None and layer.layer_id == batch.attn_layers[0].layer_id:
            assert batch.tree is not None
            plan.bits.write(batch, batch.tree)
        k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        pages = k_cache.unsqueeze(1), v_cache.unsqueeze(1)
        q = q.contiguous()
        out: Tensor = plan.wrapper.inner.run(q, pages, out=torch.empty_like(q))
        return out


def _plan(
    plan: FlashInferPlan,
    batch: ForwardBatch,
    lengths: HostLengths,
    slots: Tensor,
    mask: Tensor | None,
) -> None:
    """mask: packed bits; None where the wrapper holds them already or there is no tree."""
    layer = batch.attn_layers[0]
    k_cache, _ = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    keys = lengths.kv_indptr, slots, lengths.ones
    shape = layer.num_heads, layer.num_kv_heads, layer.head_dim
    settings = {
        "sm_scale": layer.scale,
        "window_left": -1 if layer.sliding_window is None else layer.sliding_window - 1,
        "logits_soft_cap": layer.softcap,
        "q_data_type": k_cache.dtype,
        "kv_data_type": k_cache.dtype,
    }
    if batch.forward_mode.is_decode():
        plan.wrapper.plan(*keys, *shape, 1, **settings)
    else:
        plan.wrapper.plan(
            *(lengths.qo_indptr, *keys, *shape, 1),
            causal=plan.bits is None,
            packed_custom_mask=mask,
            **settings,
        )


def _bits_of(batch: ForwardBatch) -> TreeBits | None:
    if batch.tree is None:
        return None
    lens = zip(batch.prefix_lens_cpu, batch.extend_lens_cpu, strict=True)
    sizes = [(n * (p + n) + 7) // 8 for p, n in lens]
    return TreeBits.of(batch, sum(sizes), max(sizes))
