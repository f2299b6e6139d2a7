"""Triton's attention over K and V in FP8 against the plain one, and what is written there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.dispatch import Backend
from specengine.kernels.kv.fp8_rows import FP8, read_rows, write_rows
from tests.kernels.test_paged_attention import FORK, SCALE, Inputs, inputs

LENS = [(40, len(FORK)), (9, len(FORK))]
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


@pytest.mark.parametrize("trees", [None, [FORK, FORK]], ids=["chain", "tree"])
def test_the_fused_kernel_sees_new_keys_as_later_forwards_do(
    trees: list[list[int]] | None, device: torch.device
) -> None:
    given = in_fp8(inputs(LENS, device, trees=trees))
    batch, heads = given.batch, given.k_cache.shape[1]
    tokens, _, head_dim = given.q.shape
    k, v = (grid(torch.randn(tokens, heads, head_dim, device=device)) for _ in range(2))
    k[:, 0, 0] = v[:, 0, 1] = 700.0  # of which FP8 keeps 448: exact keys would show
    request = torch.repeat_interleave(
        torch.arange(len(batch.seq_lens), device=device), batch.qo_indptr.diff()
    )
    prefix = (batch.seq_lens - batch.qo_indptr.diff())[request]
    place = prefix + torch.arange(tokens, device=device) - batch.qo_indptr[request]
    loc = batch.req_to_token[batch.req_pool_indices[request], place].long()
    half = head_dim // 2
    still = torch.cat([torch.ones(512, half), torch.zeros(512, half)], 1).to(device)
    results = []
    for backend in BACKENDS:
        pair = given.k_cache.clone(), given.v_cache.clone()
        out = rope_attention(
            given.q, k, v, still, *pair, loc, batch, SCALE, num_splits=2, backend=backend
        )
        results.append((out, *(cache.view(torch.uint8) for cache in pair)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-4)
    assert torch.equal(results[1][1], results[0][1])
    assert torch.equal(results[1][2], results[0][2])


def test_rows_of_other_types_are_written_as_they_are() -> None:
    cache = torch.zeros(4, 1, 2)
    write_rows(cache, torch.tensor([2]), torch.full((1, 1, 2), 1000.0))
    assert read_rows(cache, torch.tensor([2, 0]), torch.float32).flatten().tolist() == [
        1000,
        1000,
        0,
        0,
    ]
