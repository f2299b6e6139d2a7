"""Fused attention for some requests (CUDA C++) on a GPU, against PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine.kernels.attention import rope_attention_cuda
from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.cuda import program
from specengine.kernels.linear.few_row import norm_linear
from tests.kernels import rope_attention_cases as few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() < (9, 0)
        or not program.available(),
        reason="needs clusters of blocks and CUDA C++",
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "lens",
    [
        *([(0, 1)], [(160, 1)], [(290, 2)], [(1150, 2)], [(60, 2), (700, 1), (0, 1)], [(5200, 2)]),
        *([(160, 3)], [(5200, 4)], [(1150, 4), (60, 1)] * 4, [(1150, 1), (0, 2)] * 8),
    ],
    ids=str,
)
def test_rounds_are_as_in_pytorch(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    few.check(few.draw(lens, (32, 8), device="cuda", dtype=dtype))
    few.check(few.draw(lens, (16, 4), device="cuda", dtype=dtype, normed=True))


def test_groups_of_heads_are_as_in_pytorch() -> None:
    few.check(few.draw([(290, 8), (3, 0)], (8, 8), device="cuda", normed=True))
    few.check(few.draw([(700, 1), (20, 1)], (64, 8), device="cuda"))
    few.check(few.draw([(700, 2), (20, 1)], (64, 8), device="cuda"))
    few.check(few.draw([(700, 16), (20, 1)], (8, 8), device="cuda"))


@pytest.mark.parametrize(("old", "new"), [(0, 2), (16, 1), (64, 1), (290, 2), (1150, 2)])
def test_each_key_counts_once(old: int, new: int) -> None:
    given, expected = few.each_key_counts(old, new, "cuda")
    found = given.run("cuda").out.float()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-4)


def test_bits_are_the_same_each_time() -> None:
    """Blocks and warps meet in another order each time."""
    for lens in ([(290, 2), (60, 2)], [(3000, 2)], [(1150, 4)] * 8, [(290, 1)] * 16):
        given = few.draw(lens, (32, 8), device="cuda")
        first = given.run("cuda")
        for _ in range(100):
            again = given.run("cuda")
            assert torch.equal(again.out, first.out)
            assert torch.equal(again.k_cache.view(torch.int16), first.k_cache.view(torch.int16))


def test_rows_of_a_kernel_that_signals_early_are_awaited() -> None:
    """In a graph, whose buffers hold the rows of the replay before."""
    given = few.draw([(290, 2)], (32, 8), device="cuda")
    weight = torch.randn(48 * few.HEAD, 512, device="cuda", dtype=torch.bfloat16)
    gain, x = torch.ones_like(weight[0]), torch.ones_like(weight[:2])

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        one = replace(given, qkv=qkv.view(2, 48, few.HEAD))
        caches = given.k_cache, given.v_cache
        tensors = *one.projected, given.cos_sin, *caches, given.loc
        return rope_attention(*tensors, given.batch, few.SCALE, backend="cuda")

    attend(norm_linear(x, gain, 1e-5, weight))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(norm_linear(x, gain, 1e-5, weight))
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        qkv = norm_linear(x, gain, 1e-5, weight)
        torch.cuda.synchronize()
        expected = attend(qkv)
        graph.replay()
        assert torch.equal(out, expected)


def test_up_to_sixteen_requests_take_it_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    launch = rope_attention_cuda.rope_attention

    def counted(*given: Any) -> torch.Tensor:
        launched.append(1)
        return launch(*given)

    monkeypatch.setattr(rope_attention_cuda, "rope_attention", counted)
    few.check(few.draw([(160, 1)], (32, 8), device="cuda"), "auto")
    assert len(launched) == 1
    few.check(few.draw([(9, 4)] * 16, (32, 8), device="cuda"), "auto")
    assert len(launched) == 2
    few.check(few.draw([(9, 1)] * 32, (32, 8), device="cuda"), "auto")
    assert len(launched) == 2
