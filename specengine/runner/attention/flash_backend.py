"""FlashAttention 3, which reads lengths and page table on the device; a page is one KV slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, AttnPlan, ForwardBatch
from specengine.core.errors import ConfigError
from specengine.core.interfaces import AttentionLayer, AttentionLimits
from specengine.core.tree import Tree
from specengine.kernels.attention import flash_attention
from specengine.kernels.attention.flash_merge import beside_sinks, merge
from specengine.kernels.attention.types import FlashAttention, FlashKeys, FlashOutput
from specengine.runner.attention.base import RegisteredBackend, attach_plan, require, require_cuda


@dataclass
class FlashPlan:
    """Inputs of the kernel, computed in the first layer of every forward, so that a captured graph
    computes them too."""

    max_keys: int
    keys: FlashKeys | None = None  # of the whole request; under a tree, of what precedes the tree
    # under a tree: each row's ancestors and itself; whether the tree has no prefix
    nodes: FlashKeys | None = None
    is_alone_T: Tensor | None = None


class FlashAttentionBackend(RegisteredBackend):
    """Nothing is planned on the host. FlashAttention takes no mask: under a tree, rows attend to
    the prefix and to their ancestors in two calls, and the results are merged."""

    name = "fa"
    limits = AttentionLimits(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset(range(8, 257, 8)),
        windows_under_trees=False,
        softcap=True,
        sinks=True,
    )

    def __init__(self, flash: FlashAttention) -> None:
        self.flash = flash

    @classmethod
    def for_device(cls, device: torch.device) -> AttentionBackend:
        require(flash_attention.is_installed(), "sglang-kernel")
        require_cuda(device, "fa")
        try:
            flash = flash_attention.load()
        except ImportError as error:
            raise ConfigError(
                f"FlashAttention 3 cannot be loaded ({error}); install a build for this PyTorch, "
                "or use triton"
            ) from error
        return cls(flash)

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        return attach_plan(self.name, batch, FlashPlan(batch.max_seq_len))

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        """Launches are sized for the longest request that the page table can hold."""
        context = batch.req_to_token_pool.req_to_token.shape[1]
        return attach_plan(self.name, batch, FlashPlan(context))

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        plan: FlashPlan = batch.attn_plan.metadata
        if plan.keys is None or layer.layer_id == batch.attn_layers[0].layer_id:
            _prepare(plan, batch)
        assert plan.keys is not None
        cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        scale, cap = layer.scale, layer.softcap
        if plan.nodes is None:
            window = layer.sliding_window
            return self.flash(q, *cache, plan.keys, scale, window, cap, layer.sinks).out
        before = self.flash(q, *cache, plan.keys, scale, None, cap, None)
        among = self.flash(q, *cache, plan.nodes, scale, None, cap, None)
        assert plan.is_alone_T is not None
        before = _without(plan.is_alone_T, before)
        return beside_sinks(merge(before, among), layer.sinks).out


def _prepare(plan: FlashPlan, batch: ForwardBatch) -> None:
    seq_lens_B = batch.seq_lens
    if batch.tree is not None:
        # Padding requests of a graph are shorter than their past nodes.
        before = batch.extend_lens + batch.tree.num_past
        seq_lens_B = (batch.seq_lens - before).clamp(min=0)
        rows_T = torch.arange(batch.num_tokens, device=seq_lens_B.device)
        request_T = torch.searchsorted(batch.qo_indptr[1:-1], rows_T, right=True)
        plan.nodes = _nodes(batch, batch.tree, request_T, seq_lens_B)
        plan.is_alone_T = seq_lens_B[request_T] == 0
    plan.keys = FlashKeys(
        table=batch.req_to_token_pool.req_to_token,
        rows=batch.req_pool_indices.int(),
        seq_lens=seq_lens_B.int(),
        qo_indptr=batch.qo_indptr.int(),
        max_queries=batch.max_extend_len,
        max_keys=plan.max_keys,
        causal=batch.tree is None,
    )


def _nodes(batch: ForwardBatch, tree: Tree, request_T: Tensor, first_B: Tensor) -> FlashKeys:
    """Every row as a request whose page table lists the slots of the nodes that it sees."""
    table, device = batch.req_to_token_pool.req_to_token, first_B.device
    starts_T = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=device)
    mask_BNM = tree.mask_BNN.to(device)
    node_T = (starts_T[:-1] - batch.qo_indptr[request_T]).clamp(max=mask_BNM.shape[1] - 1)
    # Columns past a request's own nodes hold what buffers of graphs had before.
    columns_M = torch.arange(mask_BNM.shape[2], device=device)
    is_own_BM = columns_M < (batch.extend_lens + tree.num_past)[:, None]
    seen_TM = mask_BNM[request_T, node_T] & is_own_BM[request_T]
    order_TM = seen_TM.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    places_TM = (first_B[request_T, None] + order_TM).clamp(max=table.shape[1] - 1)
    return FlashKeys(
        table=table[batch.req_pool_indices[request_T, None], places_TM],
        rows=None,
        seq_lens=seen_TM.sum(1, dtype=torch.int32),
        qo_indptr=starts_T,
        max_queries=1,
        max_keys=mask_BNM.shape[2],
        causal=False,
    )


def _without(rows_T: Tensor, part: FlashOutput) -> FlashOutput:
    """Gives these rows, which have no key in this part, no weight in the merge."""
    out = part.out.masked_fill(rows_T[:, None, None], 0.0)
    return FlashOutput(out, part.lse.masked_fill(rows_T, float("-inf")))
