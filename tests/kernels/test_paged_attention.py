"""The Triton kernel against the loop in paged_attention_ref, over scattered slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.types import PagedBatch

SCALE = 0.21
CONTEXT = 200

# 0 ─┬─ 1 ─── 3
#    └─ 2 ─┬─ 4 ─── 6
#          └─ 5
BUSHY = [-1, 0, 0, 1, 2, 2, 4]
# 0 ─── 1 ─┬─ 2
#          └─ 3
FORK = [-1, 0, 1, 1]


@dataclass
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch

    def check(
        self,
        tolerance: float = 3e-6,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        num_splits: int | None = None,
    ) -> None:
        given = (self.q, self.k_cache, self.v_cache, self.batch, SCALE)
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        expected = paged_attention(*given, **options, backend="torch")
        out = paged_attention(*given, **options, num_splits=num_splits, backend="triton")
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        assert self.batch.counters is not None
        assert not self.batch.counters.any()


def inputs(
    lens: list[tuple[int, int]],
    device: torch.device,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    trees: list[list[int]] | None = None,
    num_past: int = 0,
) -> Inputs:
    """Requests given by (prefix length, new tokens), the first num_past nodes of each tree in the
    prefix. Everything no request owns is NaN."""
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    slots = torch.randperm(sum(p + e for p, e in lens)) + 1
    table = torch.zeros(len(lens) + 1, CONTEXT, dtype=torch.int32)
    for row, part in enumerate(torch.split(slots, [p + e for p, e in lens])):
        table[row + 1, : len(part)] = part
    kv = torch.randn(2, len(slots) + 1, num_kv_heads, head_dim)
    kv[:, 0] = float("nan")
    news = [e for _, e in lens]
    depths = [range(e) for e in news] if trees is None else [depths_of(tree) for tree in trees]
    positions = [
        p - num_past + d
        for (p, _), depth in zip(lens, depths, strict=True)
        for d in depth[num_past:]
    ]
    batch = PagedBatch(
        req_to_token=table.to(device),
        req_pool_indices=torch.arange(1, len(lens) + 1, device=device),
        seq_lens=torch.tensor([p + e for p, e in lens], device=device),
        qo_indptr=torch.tensor([0, *accumulate(news)], device=device),
        positions=torch.tensor(positions, device=device),
        max_queries=max(news),
        max_keys=CONTEXT,
        tree_mask=None
        if trees is None
        else tree_mask_of(trees)[:, num_past:].contiguous().to(device),
        num_past=num_past,
        counters=torch.zeros(4096, dtype=torch.int32, device=device),
    )
    q = torch.randn(sum(news), num_heads, head_dim)
    k_cache, v_cache = kv.to(device, dtype)
    return Inputs(q.to(device, dtype), k_cache, v_cache, batch)


def seen_from(given: Inputs, first_keys: list[int]) -> Inputs:
    """The same, of which each request sees nothing before its first key."""
    rows = torch.tensor([0, *first_keys], device=given.q.device)
    return replace(given, batch=replace(given.batch, first_keys=rows))


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_mask_of(trees: list[list[int]]) -> Tensor:
    most = max(len(parents) for parents in trees)
    mask = torch.zeros(len(trees), most, most, dtype=torch.bool)
    for request, parents in enumerate(trees):
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[request, node] = mask[request, parent]
            mask[request, node, node] = True
    return mask


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_decode(device: torch.device, window: int | None, splits: int) -> None:
    """Lengths of one key, less than a block, exactly two blocks, and enough for every split."""
    given = inputs([(0, 1), (12, 1), (63, 1), (130, 1)], device)
    given.check(window=window, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_first_keys(device: torch.device, window: int | None, splits: int) -> None:
    """From the first token, from the middle of a block, from the newest on, and from beyond."""
    given = inputs([(150, 2), (140, 3), (130, 1), (9, 1)], device)
    seen_from(given, [0, 71, 130, 500]).check(window=window, num_splits=splits)


@pytest.mark.parametrize("window", [None, 5])
def test_extend(device: torch.device, window: int | None) -> None:
    """Ragged, with and without a prefix, over several tiles of queries."""
    inputs([(0, 13), (40, 3), (7, 25)], device).check(window=window)


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(device: torch.device, splits: int) -> None:
    """Once in each row's softmax, however many programs share its keys."""
    sinks = torch.linspace(-2.0, 3.0, 6).to(device)
    inputs([(70, 4), (0, 3)], device).check(1e-5, sinks=sinks, num_splits=splits)
    tree = inputs([(11, 7), (60, 4)], device, trees=[BUSHY, FORK])
    tree.check(1e-5, window=9, sinks=sinks, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_tree(device: torch.device, window: int | None, splits: int) -> None:
    given = inputs([(45, 7), (0, 4), (20, 1)], device, trees=[BUSHY, FORK, [-1]])
    given.check(window=window, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_that_grows_by_a_level(
    device: torch.device, window: int | None, splits: int
) -> None:
    """Two of seven nodes are new; and one of four, on three of them."""
    given = inputs([(45, 2), (5, 2)], device, trees=[BUSHY, BUSHY], num_past=5)
    given.check(window=window, num_splits=splits)
    given = inputs([(33, 1), (3, 1)], device, trees=[FORK, FORK], num_past=3)
    given.check(window=window, num_splits=splits)


def test_a_split_may_fall_inside_the_tree(device: torch.device) -> None:
    """The second share of 32 keys begins between nodes 1 and 2."""
    given = inputs([(30, 7)], device, trees=[BUSHY])
    given.check(num_splits=2)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (16, 2)])
def test_head_groups(device: torch.device, heads: tuple[int, int]) -> None:
    inputs([(20, 3), (35, 2)], device, heads=heads).check(num_splits=2)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(device: torch.device, head_dim: int) -> None:
    inputs([(40, 2)], device, heads=(2, 1), head_dim=head_dim).check(1e-5, num_splits=2)


def test_half_precision(device: torch.device) -> None:
    inputs([(40, 2), (9, 5)], device, dtype=torch.float16).check(2e-3, num_splits=2)


def test_rows_and_lengths_are_read_on_the_device(device: torch.device) -> None:
    """The bounds given to the host only shape the launch: a captured graph keeps them."""
    given = inputs([(40, 1), (9, 1)], device)
    given.batch = replace(given.batch, max_queries=4)
    given.check(num_splits=2)
    given.batch.seq_lens.copy_(torch.tensor([12, 3]))
    given.batch.req_pool_indices.copy_(torch.tensor([2, 1]))
    given.batch.req_to_token[2, 10:12] = given.batch.req_to_token[1, :2]
    given.check(num_splits=2)


def test_nothing_is_split_without_counters(device: torch.device) -> None:
    given = inputs([(150, 1)], device)
    args = (given.q, given.k_cache, given.v_cache, replace(given.batch, counters=None), SCALE)
    out = paged_attention(*args, backend="triton")
    torch.testing.assert_close(out, paged_attention(*args, backend="torch"))


def test_zero_tokens(device: torch.device) -> None:
    given = inputs([(5, 1)], device)
    empty = paged_attention(
        given.q[:0], given.k_cache, given.v_cache, given.batch, SCALE, backend="triton"
    )
    assert empty.shape == (0, 6, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_long_ragged_batches_on_a_gpu(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = torch.device("cuda")
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    shape = {"heads": heads, "head_dim": head_dim, "dtype": dtype}
    for splits in (None, 7):
        decode = [(p, 1) for p in (0, 1, 63, 64, 127, 198)]
        inputs(decode, cuda, **shape).check(tolerance, num_splits=splits)  # type: ignore[arg-type]
        extend = [(0, 190), (100, 64), (3, 17), (150, 1)]
        inputs(extend, cuda, **shape).check(tolerance, 50, splits)  # type: ignore[arg-type]
