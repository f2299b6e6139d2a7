"""The fused Triton kernel against rotation, write and attention one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.kernels.attention import rope_attention_blocks
from specengine.kernels.attention import rope_attention_triton as triton_kernel
from specengine.kernels.attention.rope_attention import has_registers, rope_attention
from specengine.kernels.attention.rope_attention_blocks import (
    Blocks,
    blocks_for,
    choose_splits,
    rows_for,
    within,
)
from specengine.kernels.attention.types import HeadNorms
from specengine.kernels.dispatch import Backend
from tests.kernels.test_paged_attention import (
    BUSHY,
    CONTEXT,
    FORK,
    SCALE,
    Inputs,
    inputs,
    seen_from,
)


def angles(head_dim: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(CONTEXT)[:, None] * torch.rand(head_dim // 2)
    return torch.cat([places.cos(), places.sin()], dim=-1).to(device)


def check(
    given: Inputs,
    tolerance: float = 3e-6,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    num_splits: int | None = None,
) -> None:
    q, batch = given.q, given.batch
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = given.k_cache.shape[1]
    qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim, device=q.device).to(q.dtype)
    new_q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    request = torch.repeat_interleave(
        torch.arange(len(batch.seq_lens), device=q.device), batch.qo_indptr.diff()
    )
    prefix = (batch.seq_lens - batch.qo_indptr.diff())[request]
    place = prefix + torch.arange(tokens, device=q.device) - batch.qo_indptr[request]
    loc = batch.req_to_token[batch.req_pool_indices[request], place].long()
    results = []
    backends: tuple[Backend, ...] = ("torch", "triton")
    for backend in backends:
        k_cache, v_cache = given.k_cache.clone(), given.v_cache.clone()
        out = rope_attention(
            new_q,
            k,
            v,
            angles_of(head_dim, q.device),
            k_cache,
            v_cache,
            loc,
            batch,
            SCALE,
            window=window,
            softcap=softcap,
            sinks=sinks,
            norms=norms,
            num_splits=num_splits,
            backend=backend,
        )
        results.append((out, k_cache[1:], v_cache[1:]))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert batch.counters is not None
    assert not batch.counters.any()


_ANGLES: dict[tuple[int, torch.device], torch.Tensor] = {}


def angles_of(head_dim: int, device: torch.device) -> torch.Tensor:
    return _ANGLES.setdefault((head_dim, device), angles(head_dim, device))


def test_decode(device: torch.device) -> None:
    check(inputs([(9, 1), (0, 1), (33, 1)], device))


def test_chain(device: torch.device) -> None:
    check(inputs([(9, 4), (0, 2), (40, 1)], device))


def test_split_keys_are_merged(device: torch.device) -> None:
    check(inputs([(190, 3), (5, 1), (100, 2)], device), num_splits=3)


def test_window(device: torch.device) -> None:
    check(inputs([(70, 4), (3, 3)], device), window=37)
    check(inputs([(20, 4)], device), window=2)


def test_sinks(device: torch.device) -> None:
    """Once in each row's softmax, however many programs share its keys."""
    sinks = torch.linspace(-2.0, 3.0, 6).to(device)
    check(inputs([(70, 4), (0, 3)], device), 1e-5, sinks=sinks)
    check(inputs([(11, 7), (60, 4)], device, trees=[BUSHY, FORK]), 1e-5, sinks=sinks)
    check(inputs([(190, 3), (5, 1)], device), 1e-5, window=37, sinks=sinks, num_splits=3)


def test_softcap(device: torch.device) -> None:
    check(inputs([(70, 4), (3, 3)], device), 1e-5, softcap=0.5)
    check(inputs([(11, 7), (60, 4)], device, trees=[BUSHY, FORK]), 1e-5, softcap=0.5)
    check(inputs([(190, 3), (5, 1)], device), 1e-5, window=37, softcap=0.5, num_splits=3)


def norms_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> HeadNorms:
    gains = torch.linspace(0.5, 2.0, 2 * head_dim).to(device, dtype)
    return HeadNorms(gains[:head_dim], gains[head_dim:], 0.1)


def test_norms_of_heads(device: torch.device) -> None:
    norms = norms_of(16, torch.float32, device)
    check(inputs([(9, 4), (0, 2), (40, 1)], device), norms=norms)
    check(inputs([(190, 3), (5, 1), (100, 2)], device), norms=norms, num_splits=3)
    check(inputs([(11, 7), (60, 4)], device, trees=[BUSHY, FORK]), norms=norms)
    for size in (80, 256):  # in the kernel, and before it
        given = inputs([(20, 2)], device, head_dim=size)
        check(given, norms=norms_of(size, torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_of_heads_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """With gains of the same precision, and with wider ones, as of Gemma."""
    given = inputs([(40, 3)], device, dtype=torch.float16)
    check(given, tolerance=4e-3, norms=norms_of(16, dtype, device))


def test_first_keys(device: torch.device) -> None:
    given = seen_from(inputs([(190, 3), (5, 1), (100, 2)], device), [61, 0, 300])
    check(given, num_splits=3)
    check(given, window=37)


def test_trees(device: torch.device) -> None:
    check(inputs([(11, 7), (60, 4)], device, trees=[BUSHY, FORK]))


def test_tiles_of_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among few programs each takes some of the rows; one of them writes the new keys."""
    monkeypatch.setattr(triton_kernel, "rows_for", lambda *_: 16)
    bushy = [-1, *(node // 3 for node in range(18))]
    check(inputs([(11, 19), (60, 7), (9, 4)], device, trees=[bushy, BUSHY, FORK]))
    check(inputs([(170, 19), (5, 1), (100, 12)], device), num_splits=3)
    check(inputs([(70, 12), (3, 3)], device, head_dim=80), window=7)
    half = inputs([(11, 19), (60, 7)], device, trees=[bushy, BUSHY], dtype=torch.float16)
    check(half, tolerance=4e-3)


def test_rows_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_attention_blocks, "multiprocessors", lambda _: 132)

    def rows(groups: int, wanted: int, dtype: torch.dtype = torch.float16, head: int = 64) -> int:
        return rows_for(dtype, head, groups, wanted, torch.device("cpu"))

    assert [rows(groups, 48) for groups in (3, 24, 26, 27)] == [16, 16, 16, 64]
    assert rows(3, 3) == 16
    assert rows(39, 27) == 16
    assert rows(40, 27) == 32
    assert rows(1000, 5) == 16
    assert rows(3, 48, torch.float32) == 64
    assert [rows(3, 512, torch.float32, head) for head in (64, 96, 256)] == [64, 32, 16]
    assert rows(3, 512, torch.bfloat16, 256) == 512
    assert rows(3, 48, head=128) == 64


@pytest.mark.parametrize(
    ("given", "row_bytes", "shared", "fitting"),
    [
        ((128, 3), 128, 227 << 10, (128, 3)),
        ((128, 3), 128, 99 << 10, (128, 2)),
        ((128, 2), 256, 99 << 10, (128, 1)),
        ((128, 1), 256, 48 << 10, (64, 1)),
        ((32, 2), 512, 1 << 10, (16, 1)),
    ],
)
def test_programs_fit_the_shared_memory(
    given: tuple[int, int], row_bytes: int, shared: int, fitting: tuple[int, int]
) -> None:
    blocks = within(Blocks(given[0], 4, given[1], 128), row_bytes, shared)
    assert (blocks.keys, blocks.stages) == fitting
    assert (blocks.warps, blocks.min_share) == (4, 128)


@pytest.mark.parametrize(
    ("queries", "group", "head_dim", "is_enough"),
    [
        *((64, 1, 128, True), (65, 1, 128, False), (16, 4, 256, True)),
        *((32, 2, 256, True), (33, 1, 256, False), (17, 4, 64, False)),
    ],
)
def test_queries_of_a_program_leave_enough_registers(
    queries: int, group: int, head_dim: int, is_enough: bool
) -> None:
    assert has_registers(queries, group, head_dim) == is_enough


def test_programs_of_many_requests() -> None:
    """Where no keys are split, texts may be long."""
    found = [blocks_for(torch.bfloat16, 64, groups, 3) for groups in (192, 249, 384, 512, 768)]
    assert [(one.keys, one.stages) for one in found] == [(128, 1), *[(128, 3)] * 2, *[(64, 3)] * 2]
    assert [one.peels for one in found] == [True, False, False, False, False]
    wide = [blocks_for(torch.bfloat16, 128, groups, 4) for groups in (64, 256, 1024, 2048)]
    assert [(one.keys, one.warps) for one in wide] == [(64, 4), (128, 4), (64, 4), (32, 2)]


@pytest.mark.parametrize(("groups", "shares"), [(8, 32), (32, 12), (64, 6), (128, 3), (192, 2)])
def test_programs_that_share_keys_run_at_once(
    groups: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an H200, whatever the texts' lengths: those of a graph are not known."""
    monkeypatch.setattr(rope_attention_blocks, "multiprocessors", lambda device: 132)
    batch = replace(inputs([(70, 4)], torch.device("cpu")).batch, max_keys=8192)
    batch = replace(batch, counters=torch.zeros(512, dtype=torch.int32))
    blocks = blocks_for(torch.bfloat16, 128, groups, 16)
    assert choose_splits(batch, groups, blocks, torch.device("cpu")) == shares


def test_first_keys_after_the_wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(32, 2, 2, 64, peels=False)
    monkeypatch.setattr(triton_kernel, "blocks_for", lambda *given: blocks)
    check(inputs([(70, 4), (0, 3), (32, 1)], device))
    check(inputs([(190, 3), (5, 1), (100, 2)], device), num_splits=3)
    check(inputs([(70, 4), (3, 3)], device), window=37)
    check(inputs([(20, 2), (7, 1)], device, head_dim=80))


def test_caches_that_need_wide_places(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernel, "_NARROW", 1)
    check(inputs([(70, 4), (0, 3), (32, 1)], device))


@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1)])
def test_groups(heads: tuple[int, int], device: torch.device) -> None:
    check(inputs([(20, 2), (7, 1)], device, heads=heads))


@pytest.mark.parametrize("head_dim", [32, 80])
def test_head_dims(head_dim: int, device: torch.device) -> None:
    check(inputs([(20, 2)], device, head_dim=head_dim))


def test_half_precision(device: torch.device) -> None:
    check(inputs([(40, 3)], device, dtype=torch.float16), tolerance=4e-3)
