"""Attention in plain PyTorch on any device: the reference, and the backend of CPUs."""

from __future__ import annotations

from torch import Tensor

from specengine.core.batch import AttnPlan, ForwardBatch
from specengine.core.interfaces import AttentionLayer, AttentionLimits
from specengine.runner.attention import torch_native
from specengine.runner.attention.base import RegisteredBackend, attach_plan
from specengine.runner.attention.expansion import plan_expansion
from specengine.runner.attention.torch_native import NativeDecode
from specengine.runner.attention.torch_padded import PaddedAttention, plan_padded
from specengine.runner.attention.torch_spans import SpanAttention, plan_spans

Plan = NativeDecode | PaddedAttention | SpanAttention

# Measured on two AVX-512 cores: one more call costs as much as 100 padded columns.
_CALL_IN_COLUMNS = 100
_MAX_PADDED_QUERIES = 64


class TorchAttentionBackend(RegisteredBackend):
    """Chooses its operators and their shapes by the host's lengths, and so cannot be captured in a
    CUDA graph. `limits.plans_on_host` is False all the same: there is no plan that the device
    reads later."""

    name = "torch"
    limits = AttentionLimits(
        graphs=False, softcap=True, sinks=True, fp8_kv=True, shared_kv=True, chunks=True
    )

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        return attach_plan(self.name, batch, _plan(batch), plan_expansion(batch))

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        return attach_plan(self.name, batch, _plan(batch))

    def init_forward_metadata_replay(self, batch: ForwardBatch, plan: AttnPlan) -> None:
        self.init_forward_metadata_capture(batch)

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        attention: Plan = batch.attn_plan.metadata
        k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return attention.forward(q, layer, k_cache, v_cache)


def _plan(batch: ForwardBatch) -> Plan:
    if torch_native.fits(batch):
        return torch_native.plan_native(batch)
    return plan_padded(batch) if _padding_pays(batch) else plan_spans(batch)


def _padding_pays(batch: ForwardBatch) -> bool:
    """Whether one padded call costs less than one call for each request."""
    if batch.batch_size == 1 or batch.max_extend_len > _MAX_PADDED_QUERIES:
        return False
    if 0 in batch.extend_lens_cpu:
        return False
    columns = sum(batch.prefix_lens_cpu) + sum(batch.extend_lens_cpu)
    padding = batch.batch_size * batch.max_seq_len - columns
    return padding <= _CALL_IN_COLUMNS * batch.batch_size
