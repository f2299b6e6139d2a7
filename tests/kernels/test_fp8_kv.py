"""Triton's attention over K and V in FP8 against the plain one, and what is written there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.attention.online_softmax_triton import as_in_fp8
from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.dispatch import Backend
from specengine.kernels.kv.fp8_rows import FP8, read_rows, write_rows
from tests.kernels.test_paged_attention import FORK, SCALE, Inputs, inputs

LENS = [(40, len(FORK)), (9, len(FORK))]
ONE_EACH = [(15, 1), (1, 1), (180, 1)]  # the last has blocks of keys for each of two splits
BACKENDS: tuple[Backend, ...] = ("torch", "triton")


def grid(x: Tensor) -> Tensor:
    """FP8 numbers: writing them rounds nothing, which Triton's interpreter does wrongly."""
    return x.clamp(-448, 448).to(FP8).to(x.dtype)


def in_fp8(given: Inputs) -> Inputs:
    return replace(given, k_cache=given.k_cache.to(FP8), v_cache=given.v_cache.to(FP8))


@pytest.mark.parametrize("trees", [None, [FORK, FORK]], ids=["chain", "tree"])
def test_attention_reads_fp8(trees: list[list[int]] | None, device: torch.device) -> None:

    given = in_fp8(inputs(LENS, device, trees=trees))
    for splits in (1, 2):
        found, expected = (
            paged_attention(
                given.q, given.k_cache, given.v_cache, given.batch, SCALE,
                num_splits=splits, backend=backend,
            )
            for backend in BACKENDS
        )  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6)


def test_the_reference_is_attention_over_widened_values(device: torch.device) -> None:
    given = in_fp8(inputs([(30, 2), (5, 1)], device))
    wide = [cache.to(given.q.dtype) for cache in (given.k_cache, given.v_cache)]
    expected = paged_attention(given.q, *wide, given.batch, SCALE, backend="torch")
    narrow = given.k_cache, given.v_cache
    found = paged_attention(given.q, *narrow, given.batch, SCALE, backend="torch")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_new_keys_are_written_in_fp8(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    q, k, v = (grid(300 * torch.randn(3, heads, 16)).to(device, dtype) for heads in (4, 2, 2))
    k[0, 0, 0] = v[2, 1, 3] = 1000.0  # clipped
    loc = torch.tensor([4, 1, 7], device=device)
    caches = [torch.zeros(9, 2, 16, device=device).to(FP8) for _ in range(4)]
    still = torch.cat([torch.ones(5, 8), torch.zeros(5, 8)], 1).to(device)
    at = torch.tensor([0, 3, 2], device=device)
    for backend, pair in zip(BACKENDS, (caches[:2], caches[2:]), strict=True):
        out = rope_store_kv(q, k, v, at, still, *pair, loc, backend=backend)
        assert torch.equal(out, q)
        for cache, new in zip(pair, (k, v), strict=True):
            assert torch.equal(read_rows(cache, loc, dtype), new.clamp(-448, 448))
            others = torch.tensor([0, 2, 3, 5, 6, 8], device=device)
            assert not read_rows(cache, others, dtype).any()


@dataclass(frozen=True)
class Written:
    """What attention gives, and the bytes of both caches behind it."""

    out: Tensor
    k_bytes: Tensor
    v_bytes: Tensor


def run_fused(given: Inputs, backend: Backend, num_splits: int | None) -> Written:
    """New keys at the end of each request, one value of which FP8 cannot hold; nothing rotates."""
    torch.manual_seed(1)
    batch, device = given.batch, given.q.device
    tokens, _, head_dim = given.q.shape
    shape = tokens, given.k_cache.shape[1], head_dim
    k, v = (grid(torch.randn(shape)).to(device, given.q.dtype) for _ in range(2))
    k[:, 0, 0] = v[:, 0, 1] = 700.0  # of which FP8 keeps 448: exact keys would show
    counts = batch.qo_indptr.diff()
    request = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    prefix = (batch.seq_lens - counts)[request]
    place = prefix + torch.arange(tokens, device=device) - batch.qo_indptr[request]
    loc = batch.req_to_token[batch.req_pool_indices[request], place].long()
    half = head_dim // 2
    still = torch.cat([torch.ones(512, half), torch.zeros(512, half)], 1).to(device)
    pair = given.k_cache.clone(), given.v_cache.clone()
    out = rope_attention(
        given.q, k, v, still, *pair, loc, batch, SCALE, num_splits=num_splits, backend=backend
    )
    return Written(out, *(cache.view(torch.uint8) for cache in pair))


@pytest.mark.parametrize(
    ("lens", "trees"),
    [(LENS, None), (LENS, [FORK, FORK]), (ONE_EACH, None)],
    ids=["chain", "tree", "decode"],
)
def test_the_fused_kernel_sees_new_keys_as_later_forwards_do(
    lens: list[tuple[int, int]], trees: list[list[int]] | None, device: torch.device
) -> None:
    given = in_fp8(inputs(lens, device, trees=trees))
    expected, found = (run_fused(given, backend, 2) for backend in BACKENDS)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.k_bytes, expected.k_bytes)
    assert torch.equal(found.v_bytes, expected.v_bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("lens", [LENS, ONE_EACH], ids=["chain", "decode"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_kernel_takes_half_precision_over_fp8(
    dtype: torch.dtype, head_dim: int, lens: list[tuple[int, int]], num_splits: int | None
) -> None:
    given = inputs(lens, torch.device("cuda"), heads=(4, 2), head_dim=head_dim)
    given = in_fp8(replace(given, q=given.q.to(dtype)))
    expected, found = (run_fused(given, backend, num_splits) for backend in BACKENDS)
    torch.testing.assert_close(found.out, expected.out, rtol=2e-2, atol=2e-2)
    assert torch.equal(found.k_bytes, expected.k_bytes)
    assert torch.equal(found.v_bytes, expected.v_bytes)


@triton.jit
def _as_in_fp8(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < count, other=0.0)
    tl.store(out_ptr + places, as_in_fp8(x), mask=places < count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_without_a_conversion_is_that_of_fp8(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Every number of FP8, the middles between neighbours, what lies beside those, and beyond."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 to 448
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [middles * (1 + sign * 2.0**-9) for sign in (-1, 1)]
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 30
    x = torch.cat([codes, middles, *beside, drawn, torch.tensor([449.0, 480.0, 1e4])])
    x = torch.cat([x, -x]).to(dtype).to(device)
    out = torch.empty(x.shape, device=device)
    _as_in_fp8[(triton.cdiv(len(x), 1024),)](x, out, len(x), BLOCK=1024)
    assert torch.equal(out, x.float().clamp(-448, 448).to(FP8).float())


def test_rows_of_other_types_are_written_as_they_are() -> None:
    cache = torch.zeros(4, 1, 2)
    write_rows(cache, torch.tensor([2]), torch.full((1, 1, 2), 1000.0))
    assert read_rows(cache, torch.tensor([2, 0]), torch.float32).flatten().tolist() == [
        1000,
        1000,
        0,
        0,
    ]
