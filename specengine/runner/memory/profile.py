"""Measures the temporary memory of a forward at full size by running one."""

from __future__ import annotations

import torch

from specengine.core.batch import AttentionBackend, ForwardMode, ModelWorkerBatch
from specengine.core.model import DecoderModel
from specengine.core.platform import platform_of
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.model_runner import MemoryPools, ModelRunner


def peak_of_forward(
    model: DecoderModel,
    attn_backend: AttentionBackend,
    kv_shape: KVShape,
    num_tokens: int,
    num_requests: int,
    device: torch.device,
    feature_layers: tuple[int, ...] = (),
    feature_size: int | None = None,
) -> int:
    """Bytes that an extend of `num_tokens` tokens with `num_requests` rows of logits allocates
    beyond weights and KV. Runs the model on a small KV pool of its own. feature_size: width of the
    features that a drafter's model takes in."""
    memory = platform_of(device).memory(device)
    lens = [num_tokens // num_requests] * num_requests
    table = ReqToTokenPool(num_requests, lens[0], device)
    kv = MHATokenToKVPool(sum(lens) + 1, kv_shape, device)
    rows = [table.alloc() for _ in lens]
    runner = ModelRunner(model, device, MemoryPools(table, kv), attn_backend, feature_layers)
    batch = ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(sum(lens), dtype=torch.int64),
        req_pool_indices=[row for row in rows if row is not None],
        prefix_lens=[0] * num_requests,
        extend_lens=lens,
        logits_rows=[lens[0] * (i + 1) - 1 for i in range(num_requests)],
        sampling=None,
    )
    before = memory.current()
    memory.reset_peak()
    on_device = runner.new_forward_batch(batch)
    if feature_size is not None:
        dtype = kv_shape.dtype
        on_device.features = torch.zeros(sum(lens), feature_size, dtype=dtype, device=device)
    runner.forward(on_device)
    return memory.peak() - before
