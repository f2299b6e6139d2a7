"""A runner in miniature: pools, a page table and the reference attention, for models alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode, ModelWorkerBatch
from specengine.core.tree import Tree
from specengine.layers.attention import attention_layers
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.state_pool import StateSizes
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.memory.kept_state import make_states
from specengine.runner.memory.kv_shape import kv_shape_of

_ROOM = 160  # tokens a request
_NODES = 16  # of one verification


@dataclass
class _PageTable:
    req_to_token: Tensor


class MiniRunner:
    """Runs a model on new tokens of several requests, which keep their KV from call to call."""

    def __init__(self, model: Any, num_requests: int = 2) -> None:
        self.model = model
        slots = torch.randperm(num_requests * _ROOM, generator=torch.Generator().manual_seed(1)) + 1
        rows = torch.zeros(1 + num_requests, _ROOM, dtype=torch.int32)  # row 0 is no request's
        rows[1:] = slots.view(num_requests, _ROOM)
        self.table = _PageTable(rows)
        dtype = model.embed.weight.dtype
        shape = kv_shape_of([model], dtype)
        self.pool = MHATokenToKVPool(num_requests * _ROOM + 1, shape, torch.device("cpu"))
        self.backend = TorchAttentionBackend()
        self.states = make_states(model, StateSizes(len(rows), nodes=_NODES), torch.device("cpu"))
        self.lens = [0] * num_requests

    def batch(
        self, mode: ForwardMode, tokens: Sequence[Sequence[int]], tree: Tree | None = None
    ) -> ForwardBatch:
        """tokens: the new ones of each request."""
        snapshot = ModelWorkerBatch(
            forward_mode=mode,
            input_ids=torch.tensor([t for new in tokens for t in new], dtype=torch.int64),
            req_pool_indices=list(range(1, 1 + len(tokens))),
            prefix_lens=self.lens[: len(tokens)],
            extend_lens=[len(new) for new in tokens],
            logits_rows=None,
            sampling=None,
            tree=tree,
        )
        cpu = torch.device("cpu")
        batch = ForwardBatch.init_new(snapshot, cpu, self.table, self.pool, self.backend)
        batch.attn_layers = attention_layers(self.model)
        batch.states = self.states
        if batch.num_tokens:
            self.backend.init_forward_metadata(batch)
        for index, new in enumerate(tokens):
            self.lens[index] += len(new)
        return batch

    @torch.no_grad()
    def logits(self, mode: ForwardMode, tokens: Sequence[Sequence[int]]) -> Tensor:
        """float32 [T, V]."""
        batch = self.batch(mode, tokens)
        hidden = self.model(batch.input_ids, batch.positions, batch)
        found: Tensor = self.model.head.logits(hidden)
        return found


@pytest.fixture
def mini_runner() -> type[MiniRunner]:
    return MiniRunner
