"""BlockPartials in Triton: how they are made, and read."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_key(x, index):
    """int64 above 0 that orders as x float32 does, and prefers the first index among equals."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits < 0, -1 - bits, bits + 0x80000000)
    return (ordered << 31) | (0x7FFFFFFF - index.to(tl.int64))


@triton.jit
def key_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    ordered = key >> 31
    bits = tl.where(ordered >= 0x80000000, ordered - 0x80000000, -1 - ordered)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def best_keys(keys, ranks, K: tl.constexpr):
    """The K largest keys of each row, falling, [rows, BLOCK_K]; -1 beyond."""
    found = tl.full([keys.shape[0], ranks.shape[0]], -1, tl.int64)
    for k in range(K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], -1, keys)
        found = tl.where((ranks == k)[None, :], best[:, None], found)
    return found


@triton.jit
def make_share(logits_ptr, keys_ptr, sums_ptr, num_cols, K: tl.constexpr, BLOCK: tl.constexpr):
    """Leave the K best keys, the maximum and the sum of exponentials of this program's columns."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    x = tl.load(logits_ptr + cols, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(sums_ptr, largest)
    tl.store(sums_ptr + 1, tl.sum(tl.exp(x - finite), 0))
    keys = tl.where(inside, ordered_key(x, cols), -1)
    for k in range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -1, keys)
        tl.store(keys_ptr + k, best)


@triton.jit
def load_sums(sums_ptr, rows, valid, shares, SHARES: tl.constexpr):
    """The largest and the sum that each share of each row has left, [rows, SHARES]."""
    places = tl.arange(0, SHARES)
    cells = sums_ptr + (rows[:, None] * shares + places[None, :]) * 2
    mask = valid[:, None] & (places < shares)[None, :]
    largest = tl.load(cells, mask=mask, other=float("-inf"), cache_modifier=".cg")
    return largest, tl.load(cells + 1, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def log_sums(largest, sums, valid):
    """Log-sum-exp of each row."""
    top = tl.max(largest, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(largest - top[:, None]), 1)
    return top + tl.log(tl.where(valid, total, 1.0))


@triton.jit
def topk_candidates(
    keys_ptr, rows, valid, shares, width,
    K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_SHARES: tl.constexpr,
):  # fmt: skip
    """Keys among which the K best of each row are, [BLOCK_P, BLOCK_K * BLOCK_K]: those of the K
    shares whose best are the best. Below them, and in place of others, -1."""
    places, ranks = tl.arange(0, BLOCK_SHARES), tl.arange(0, BLOCK_K)
    first = (rows * shares)[:, None]
    # Written by other multiprocessors: not to be read through this one's first-level cache.
    heads = tl.load(
        keys_ptr + (first + places[None, :]) * K,
        mask=valid[:, None] & (places < shares)[None, :],
        other=-1,
        cache_modifier=".cg",
    )
    best = best_keys(heads, ranks, K)
    chosen = tl.where(best > 0, key_index(best) // width % shares, -1)
    keys = tl.load(
        keys_ptr + (first + chosen)[:, :, None] * K + ranks[None, None, :],
        mask=(chosen >= 0)[:, :, None] & (ranks < K)[None, None, :],
        other=-1,
        cache_modifier=".cg",
    )
    return tl.reshape(keys, [BLOCK_P, BLOCK_K * BLOCK_K])
