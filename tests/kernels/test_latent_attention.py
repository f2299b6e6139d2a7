"""The Triton kernels of latent attention against their references, over scattered slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.attention import ragged_attention as ragged
from specengine.kernels.attention.latent_attention import latent_attention
from specengine.kernels.attention.latent_store import latent_store
from specengine.kernels.attention.ragged_attention import ragged_attention
from specengine.kernels.attention.types import KeySpan, PagedBatch
from specengine.kernels.kv.fp8_rows import FP8
from tests.kernels.test_paged_attention import BUSHY, FORK, SCALE, inputs

RANK, ROPE = 32, 8


@dataclass
class Latents:
    q: Tensor
    cache: Tensor
    batch: PagedBatch

    def check(self, tolerance: float = 3e-6, num_splits: int | None = None) -> None:
        given = self.q, self.cache, self.cache.shape[2] - ROPE, self.batch, SCALE
        expected = latent_attention(*given, backend="torch")
        found = latent_attention(*given, num_splits=num_splits, backend="triton")
        assert found.shape == (*self.q.shape[:2], self.cache.shape[2] - ROPE)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def latents(
    lens: list[tuple[int, int]], device: torch.device, heads: int = 5, rank: int = RANK, **more: Any
) -> Latents:
    made = inputs(lens, device, heads=(heads, 1), head_dim=rank + ROPE, **more)
    return Latents(made.q, made.k_cache, made.batch)


@pytest.mark.parametrize("splits", [1, 3])
def test_decode(device: torch.device, splits: int) -> None:
    """Lengths of one key, less than a block, two blocks, and enough for every split."""
    latents([(0, 1), (12, 1), (31, 1), (130, 1)], device).check(num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_chains_over_several_tiles(device: torch.device, splits: int) -> None:
    """Tiles of 16 rows begin and end in the middle of a query's heads."""
    latents([(40, 4), (7, 9), (0, 5)], device).check(num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_trees(device: torch.device, splits: int) -> None:
    trees = [BUSHY, FORK, [-1]]
    latents([(45, 7), (0, 4), (20, 1)], device, trees=trees).check(num_splits=splits)


def test_a_tree_that_grows_by_a_level(device: torch.device) -> None:
    given = latents([(45, 2), (5, 2)], device, trees=[BUSHY, BUSHY], num_past=5)
    given.check(num_splits=2)


def test_first_keys(device: torch.device) -> None:
    given = latents([(150, 2), (140, 3), (9, 1)], device)
    rows = torch.tensor([0, 0, 71, 500], device=device)
    replace(given, batch=replace(given.batch, first_keys=rows)).check(num_splits=2)


@pytest.mark.parametrize("heads", [1, 16, 24])
def test_numbers_of_heads(device: torch.device, heads: int) -> None:
    latents([(20, 3), (35, 2)], device, heads=heads).check(num_splits=2)


def test_ranks_that_are_no_power_of_two(device: torch.device) -> None:
    latents([(20, 3)], device, rank=40).check(num_splits=2)


def test_latents_in_fp8(device: torch.device) -> None:
    given = latents([(40, 2), (5, 1)], device)
    replace(given, cache=given.cache.to(FP8)).check(num_splits=2)


def test_rows_and_lengths_are_read_on_the_device(device: torch.device) -> None:
    """The bounds given to the host only shape the launch: a captured graph keeps them."""
    given = latents([(40, 1), (9, 1)], device)
    given.batch = replace(given.batch, max_queries=4)
    given.check(num_splits=2)
    given.batch.seq_lens.copy_(torch.tensor([12, 3]))
    given.batch.req_pool_indices.copy_(torch.tensor([2, 1]))
    given.batch.req_to_token[2, 10:12] = given.batch.req_to_token[1, :2]
    given.check(num_splits=2)


def test_zero_tokens(device: torch.device) -> None:
    given = latents([(5, 1)], device)
    empty = latent_attention(given.q[:0], given.cache, RANK, given.batch, SCALE, backend="triton")
    assert empty.shape == (0, 5, RANK)


@dataclass
class New:
    """Three tokens of 9 heads, as projections give them, to scattered slots."""

    q: Tensor
    compressed: Tensor
    weight: Tensor
    positions: Tensor
    angles: Tensor
    loc: Tensor

    def store(self, has_pairs: bool, cache: Tensor, out: Tensor, backend: Any) -> None:
        latent_store(
            self.q, self.compressed, self.weight, 1e-6, self.positions, self.angles, has_pairs,
            out, cache, self.loc, backend=backend,
        )  # fmt: skip


def new(device: torch.device) -> New:
    torch.manual_seed(0)
    turns = torch.outer(torch.arange(32.0), torch.rand(ROPE // 2))
    projected = torch.randn(3, 9 * 20 + RANK + ROPE).to(device)
    return New(
        q=projected[:, : 9 * 20].view(3, 9, 20)[..., 12:],
        compressed=projected[:, 9 * 20 :],
        weight=torch.rand(RANK).to(device),
        positions=torch.tensor([5, 0, 31], device=device),
        angles=torch.cat((turns.cos(), turns.sin()), -1).to(device),
        loc=torch.tensor([7, 2, 11], device=device),
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("has_pairs", [False, True])
def test_store_equals_the_reference(has_pairs: bool, in_place: bool, device: torch.device) -> None:
    found = []
    for backend in ("torch", "triton"):
        given = new(device)
        cache = torch.zeros(12, 1, RANK + ROPE, device=device)
        out = (
            given.q if in_place else torch.full((3, 9, RANK + ROPE), 7.0, device=device)[..., RANK:]
        )
        given.store(has_pairs, cache, out, backend)
        found.append((cache, out))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_pairs_turn_by_their_angle(device: torch.device) -> None:
    """The first pair of the second token stays, at position 0; that of the first turns."""
    given, cache = new(device), torch.zeros(12, 1, RANK + ROPE, device=device)
    out = torch.empty(3, 9, ROPE, device=device)
    given.store(True, cache, out, "torch")
    torch.testing.assert_close(out[1, :, 0], given.q[1, :, 0])
    torch.testing.assert_close(out[1, :, ROPE // 2], given.q[1, :, 1])
    pair = torch.complex(given.q[0, :, 2], given.q[0, :, 3])
    angle = torch.complex(given.angles[5, 1], given.angles[5, ROPE // 2 + 1])
    torch.testing.assert_close(out[0, :, 1], (pair * angle).real)
    torch.testing.assert_close(out[0, :, ROPE // 2 + 1], (pair * angle).imag)


def test_store_in_fp8_clips(device: torch.device) -> None:
    for backend in ("torch", "triton"):
        given = new(device)
        given.compressed[0, RANK:] = 9e3
        given.positions[:] = 0
        cache = torch.zeros(12, 1, RANK + ROPE, device=device).to(FP8)
        given.store(False, cache, torch.empty_like(given.q), backend)
        assert (cache[7, 0, RANK:].float() == 448.0).all()


@pytest.mark.parametrize("most_masked", [1, 20, 1 << 25])
def test_ragged_spans_see_what_precedes_them(
    most_masked: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "_MOST_MASKED", most_masked)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 3, d, device=device) for n, d in ((7, 8), (12, 8), (12, 5)))
    out = ragged_attention(q, k, v, [KeySpan(0, 3, 0, 3), KeySpan(3, 4, 3, 9)], SCALE)
    for row in range(7):
        first, last = (0, row) if row < 3 else (3, 8 + row - 3)
        keys = slice(first, last + 1)
        scores = torch.einsum("hd,khd->hk", q[row], k[keys]) * SCALE
        expected = torch.einsum("hk,khv->hv", scores.softmax(-1), v[keys])
        torch.testing.assert_close(out[row], expected)


def test_masks_of_long_prefixes_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*given: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        seen.append(0 if attn_mask is None else attn_mask.numel())
        return attend(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(ragged.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(ragged, "_MOST_MASKED", 64)
    q, k = torch.randn(20, 1, 8), torch.randn(30, 1, 8)
    ragged_attention(q, k, k, [KeySpan(0, 20, 0, 30)], SCALE)
    assert len(seen) == 10
    assert max(seen) <= 64
    seen.clear()
    ragged_attention(q, k, k, [KeySpan(0, 20, 0, 20)], SCALE)
    assert seen == [0]  # without keys before them none is needed


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 12288])
def test_expanded_heads_take_little_memory_on_a_gpu(prefix: int) -> None:
    """Keys are wider than values, which not all of PyTorch's kernels take: the plain one would keep
    all scores, 2 GiB here."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows, keys = 4096, prefix + 4096
    sizes = (rows, 192), (keys, 192), (keys, 128)
    given = [torch.randn(n, 16, d, dtype=torch.bfloat16, device="cuda") for n, d in sizes]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ragged_attention(*given, [KeySpan(0, rows, 0, keys)], 0.07)
    taken = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert taken < 512 << 20, f"{taken >> 20} MiB"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [16, 128])
def test_published_sizes_on_a_gpu(heads: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = torch.device("cuda")
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for splits in (None, 7):
        for lens in ([(p, 1) for p in (0, 1, 63, 64, 127, 198)], [(100, 4), (3, 7), (150, 1)]):
            made = inputs(lens, cuda, heads=(heads, 1), head_dim=576, dtype=dtype)
            given = made.q, made.k_cache, 512, made.batch, 0.07
            expected = latent_attention(*given, backend="torch")
            found = latent_attention(*given, num_splits=splits, backend="triton")
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
