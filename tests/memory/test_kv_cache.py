from __future__ import annotations

import pytest
import torch

from specengine.kernels.kv.types import KVPaths
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def test_bytes_per_token() -> None:
    """SmolLM2-135M in bfloat16: 30 layers, 3 heads of 64, K and V."""
    assert KVShape(30, 3, 64, torch.bfloat16).bytes_per_token == 23040


def test_bytes_per_token_of_latents() -> None:
    """DeepSeek-V3 in bfloat16: 61 layers of 512 + 64 numbers, V among them."""
    shape = KVShape(61, 1, 576, torch.bfloat16, value_dim=512)
    assert shape.bytes_per_token == 61 * 576 * 2


def test_layers_that_keep_nothing_take_no_memory() -> None:
    shape = KVShape(4, 1, 8, torch.float32, layer_ids=(1, 3))
    assert shape.bytes_per_token == 2 * 2 * 8 * 4
    pool = MHATokenToKVPool(5, shape, torch.device("cpu"))
    assert pool.get_kv_buffer(3)[0].shape == (5, 1, 8)
    with pytest.raises(KeyError):
        pool.get_kv_buffer(0)


def test_values_that_are_a_part_of_keys_move_with_them() -> None:
    pool = MHATokenToKVPool(6, KVShape(1, 1, 3, torch.float32, 2), torch.device("cpu"))
    k, v = pool.get_kv_buffer(0)
    k[:, 0] = torch.arange(18.0).view(6, 3)
    assert torch.equal(v, k[..., :2])
    table = torch.tensor([[0] * 6, [0, 4, 1, 2, 5, 3]], dtype=torch.int32)
    given = (torch.tensor(one) for one in ([1], [1], [[0, 2, 4]], [2]))
    pool.keep_paths(KVPaths(table, *given))
    assert (k[:, 0, 0] / 3).tolist() == [0, 2, 3, 3, 4, 5]
    assert torch.equal(v, k[..., :2])


@pytest.mark.parametrize("device", DEVICES)
def test_layers_have_buffers_of_their_own(device: str) -> None:
    pool = MHATokenToKVPool(5, KVShape(2, 3, 4, torch.float32), torch.device(device))
    k0, v0 = pool.get_kv_buffer(0)
    k0.fill_(1.0)
    v0.fill_(2.0)
    assert k0.shape == (5, 3, 4)
    assert [buffer.sum().item() for buffer in pool.get_kv_buffer(1)] == [0.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_move_reads_before_it_writes(device: str) -> None:
    pool = MHATokenToKVPool(6, KVShape(2, 1, 1, torch.float32), torch.device(device))
    for layer in range(2):
        for side, buffer in enumerate(pool.get_kv_buffer(layer)):
            buffer[:, 0, 0] = torch.arange(6) + 10 * layer + 100 * side
    table = torch.tensor([[0] * 6, [0, 4, 1, 2, 5, 3]], dtype=torch.int32, device=device)
    given = (torch.tensor(one, device=device) for one in ([1], [1], [[0, 2, 4]], [2]))
    pool.keep_paths(KVPaths(table, *given))
    for layer in range(2):
        for side, buffer in enumerate(pool.get_kv_buffer(layer)):
            base = 10 * layer + 100 * side
            assert (buffer[:, 0, 0] - base).tolist() == [0, 2, 3, 3, 4, 5]
