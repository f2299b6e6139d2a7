"""The compiled C forms against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.dispatch import Backend
from specengine.kernels.linear.activation import silu_and_mul
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm
from specengine.kernels.native import library as native_library
from specengine.kernels.native import ops as native

EPS = 1e-5
ROWS, HIDDEN = 3, 83
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-6 if actual.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    wide = torch.randn(ROWS, HIDDEN + 5).to(dtype)
    x, residual, weight = wide[:, 5:], torch.randn(ROWS, HIDDEN).to(dtype), wide[0, :HIDDEN]
    close(rms_norm(x, weight, EPS, backend="native"), rms_norm(x, weight, EPS, backend="torch"))
    normed, total = fused_add_rms_norm(x, residual, weight, EPS, backend="native")
    assert torch.equal(total, x + residual)
    close(normed, rms_norm(total, weight, EPS, backend="torch"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    x = (20 * torch.randn(ROWS, 2 * HIDDEN)).to(dtype)
    x[0, :4] = torch.tensor([0.0, 200.0, -200.0, -87.5])
    close(silu_and_mul(x, backend="native"), silu_and_mul(x, backend="torch"))


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_store(dtype: torch.dtype, rotary_dim: int) -> None:
    qkv = torch.randn(ROWS, 10 * 16).to(dtype)
    q, k, v = torch.split(qkv, [6 * 16, 2 * 16, 2 * 16], 1)
    q, k, v = q.view(ROWS, 6, 16), k.view(ROWS, 2, 16), v.view(ROWS, 2, 16)
    positions, loc = torch.tensor([0, 9, 4]), torch.tensor([5, 1, 3])
    angles = torch.randn(10, rotary_dim)
    caches = torch.zeros(2, 2, 7, 2, 16, dtype=dtype)
    backends: tuple[Backend, ...] = ("native", "torch")
    outs = [
        rope_store_kv(q, k, v, positions, angles, k_cache, v_cache, loc, backend=backend)
        for (k_cache, v_cache), backend in zip(caches, backends, strict=True)
    ]
    close(outs[0], outs[1])
    close(caches[0], caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention(dtype: torch.dtype) -> None:
    q = torch.randn(2, 6, 24).to(dtype)
    k_cache, v_cache = torch.randn(2, 40, 2, 24).to(dtype)
    table = torch.stack([torch.randperm(40), torch.randperm(40)]).to(torch.int32)
    begins, ends = torch.tensor([0, 4]), torch.tensor([1, 33])
    out = native.attend_decode(
        q,
        k_cache,
        v_cache,
        table,
        torch.tensor([1, 0]),
        begins,
        ends,
        torch.empty(33 + 2 * 24),
        0.3,
    )
    for request, row in enumerate((1, 0)):
        slots = table[row, begins[request] : ends[request]].long()
        for head in range(6):
            keys, values = (c[slots, head // 3].float() for c in (k_cache, v_cache))
            weights = (0.3 * keys @ q[request, head].float()).softmax(0)
            close(out[request, head], (weights @ values).to(dtype))


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, weight = torch.randn(5, HIDDEN), torch.randn(HIDDEN)
    together = rms_norm(x, weight, EPS, backend="native")
    assert all(
        torch.equal(rms_norm(row[None], weight, EPS, backend="native")[0], out)
        for row, out in zip(x, together, strict=True)
    )


def test_what_does_not_fit_runs_in_pytorch() -> None:
    assert native.fits(torch.empty(1, 4))
    assert not native.fits(torch.empty(0, 4))
    assert not native.fits(torch.empty(native.MAX_ROWS + 1, 4))
    assert not native.fits(torch.empty(1, 4, dtype=torch.float16))
    assert not native.fits(torch.empty(4, 4).T[:1])


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("SPECENGINE_CACHE_DIR", "/proc/nowhere")
    assert native_library.library.__wrapped__() is None
    monkeypatch.setenv("SPECENGINE_NATIVE", "0")
    assert native_library.library.__wrapped__() is None
