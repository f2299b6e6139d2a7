"""A runner of a small Llama, with room for three requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine.core.config import ModelConfig
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.target.registry import find_model_class

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(small_models: dict[str, Path]) -> torch.nn.Module:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    return load_model(source, find_model_class, torch.float32, CPU)


@pytest.fixture
def runner(model: torch.nn.Module) -> ModelRunner:
    rows = ReqToTokenPool(3, 64, CPU)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    kv = MHATokenToKVPool(200, shape, CPU)
    slots = torch.randperm(192).numpy().astype("int32") + 1
    for i in range(3):
        row = rows.alloc()
        assert row is not None
        rows.write(row, 0, slots[i * 64 : (i + 1) * 64])
    return ModelRunner(model, CPU, MemoryPools(rows, kv), TorchAttentionBackend())  # type: ignore[arg-type]
