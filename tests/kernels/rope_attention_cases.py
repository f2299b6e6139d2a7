"""Rounds of some requests with heads of 128 for the tests of the fused attention in CUDA C++."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.dispatch import Backend

HEAD = 128
SCALE = 0.2  # weights of some keys are large: another key instead of one shows


@dataclass(frozen=True)
class Result:
    out: Tensor
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True)
class Round:
    """Arguments of rope_attention; q, k and v are parts of one projection."""

    qkv: Tensor  # [T, Hq + 2 Hk, 128]
    kv_heads: int
    cos_sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    loc: Tensor
    batch: PagedBatch
    norms: HeadNorms | None = None

    @property
    def projected(self) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv.shape[1] - 2 * self.kv_heads
        q, k, v = self.qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        return q, k, v

    def run(self, backend: Backend) -> Result:
        """On copies of the caches."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        given = *self.projected, self.cos_sin, *caches, self.loc, self.batch
        out = rope_attention(*given, SCALE, norms=self.norms, backend=backend)
        return Result(out, *caches)

    def expected(self) -> Result:
        """By PyTorch in float32, but for what the cache gets."""
        wide = replace(
            self,
            qkv=self.qkv.float(),
            k_cache=self.k_cache.float(),
            v_cache=self.v_cache.float(),
            norms=None
            if self.norms is None
            else HeadNorms(
                self.norms.q_weight.float(), self.norms.k_weight.float(), self.norms.eps
            ),
        )
        return wide.run("torch")

    def only(self, request: int) -> Round:
        """The same of one request alone."""
        batch, at = self.batch, slice(request, request + 1)
        first, end = batch.qo_indptr[request : request + 2].tolist()
        alone = replace(
            batch,
            req_pool_indices=batch.req_pool_indices[at].contiguous(),
            seq_lens=batch.seq_lens[at].contiguous(),
            qo_indptr=torch.tensor([0, end - first], device=self.loc.device),
            positions=batch.positions[first:end].contiguous(),
        )
        rows = slice(first, end)
        return replace(self, qkv=self.qkv[rows], loc=self.loc[rows].contiguous(), batch=alone)


def draw(
    lens: list[tuple[int, int]],
    heads: tuple[int, int] = (8, 2),
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    normed: bool = False,
    max_queries: int | None = None,
) -> Round:
    """Requests by (tokens before, new tokens), in rows of the page table from the last one on.
    Slots are scattered; everything that no request owns is NaN, slot 0 too."""
    torch.manual_seed(0)
    num_heads, kv_heads = heads
    news, wholes = [new for _, new in lens], [old + new for old, new in lens]
    slots = torch.randperm(sum(wholes)) + 1
    table = torch.zeros(len(lens) + 1, max(wholes) + 3, dtype=torch.int32)
    loc = []
    for i, (own, (old, _)) in enumerate(zip(slots.split(wholes), lens, strict=True)):
        table[len(lens) - i, : len(own)] = own
        loc.append(own[old:])
    kv = torch.randn(2, sum(wholes) + 2, kv_heads, HEAD)
    kv[:, torch.cat([torch.tensor([0, sum(wholes) + 1]), *loc])] = float("nan")
    positions = [old + i for old, new in lens for i in range(new)]
    angles = torch.arange(max(wholes))[:, None] * torch.rand(HEAD // 2)
    k_cache, v_cache = kv.to(device, dtype)
    batch = PagedBatch(
        req_to_token=table.to(device),
        req_pool_indices=torch.arange(len(lens), 0, -1, device=device),
        seq_lens=torch.tensor(wholes, device=device),
        qo_indptr=torch.tensor([0, *accumulate(news)], device=device),
        positions=torch.tensor(positions, device=device, dtype=torch.int64),
        max_queries=max_queries or max(news),
        max_keys=table.shape[1],
    )
    qkv = torch.randn(sum(news), num_heads + 2 * kv_heads, HEAD)
    gains = torch.linspace(0.5, 1.5, 2 * HEAD).to(device, dtype)
    return Round(
        qkv=qkv.to(device, dtype),
        kv_heads=kv_heads,
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        loc=torch.cat(loc).to(device),
        batch=batch,
        norms=HeadNorms(gains[:HEAD], gains[HEAD:], 0.1) if normed else None,
    )


def each_key_counts(old: int, new: int, device: str = "cpu") -> tuple[Round, Tensor]:
    """One request whose queries see all keys alike, and what each head then gives: key i has a 1 in
    one dimension."""
    given = draw([(old, new)], device=device)
    q, k, v = given.projected
    q.zero_()
    k.zero_()
    slots = given.batch.req_to_token[1, : old + new].long()
    ones = torch.eye(HEAD, device=device).to(v.dtype)[torch.arange(old + new) % HEAD]
    given.v_cache[slots[:old]] = ones[:old, None]
    v.copy_(ones[old:, None])
    seen = torch.arange(old + 1, old + new + 1, device=device)
    means = ones.float().cumsum(0)[old:] / seen[:, None]
    return given, means[:, None].expand(q.shape)


def check(given: Round, backend: Backend = "cuda") -> None:
    """The kernel's output and new rows are near those in float32, and no other row is written."""
    found, wide = given.run(backend), given.expected()
    torch.testing.assert_close(found.out.float(), wide.out, rtol=0.02, atol=0.02)
    new = torch.zeros(len(given.k_cache), dtype=torch.bool, device=given.loc.device)
    new[given.loc] = True
    for got, expected, before in (
        (found.k_cache, wide.k_cache, given.k_cache),
        (found.v_cache, wide.v_cache, given.v_cache),
    ):
        torch.testing.assert_close(got[new].float(), expected[new], rtol=0.02, atol=0.02)
        assert torch.equal(got[~new].view(torch.int16), before[~new].view(torch.int16))
