"""Draws without replacement: Triton against PyTorch against the loop of the docstring."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.sample.draw_siblings import draw_siblings
from specengine.kernels.sample.sample_rows_ref import LEAST_WEIGHT


def random_weights(rows: int, vocab: int, seed: int = 5) -> Tensor:
    """In some rows few tokens have any weight, in some one has nearly all of it."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, vocab, generator=generator) ** 4
    weights[::3, 4:] = 0.0
    weights[1::3] *= 1e-9
    weights[1::3, vocab // 2] = 1.0
    weights[2::6, 1:] = 0.0
    weights[torch.rand(weights.shape, generator=generator) < 0.4] = 0.0
    weights /= weights.amax(-1, keepdim=True).clamp(min=LEAST_WEIGHT)
    return weights.masked_fill(weights < LEAST_WEIGHT, 0.0)


def random_uniforms(rows: int, count: int) -> Tensor:
    uniforms = torch.rand(rows, count, generator=torch.Generator().manual_seed(6)).double()
    uniforms[0] = 0.0
    uniforms[-1] = 1.0 - 2.0**-53
    return uniforms


def drawn_plainly(weights: list[float], uniforms: list[float]) -> list[int]:
    left, scale, tokens = list(weights), 1.0, []
    for u in uniforms:
        weight = [math.floor(x * scale * 2.0**43) for x in left]
        if not any(weight):
            tokens.append(-1)
            continue
        target = math.floor(u * float(sum(weight)))
        token = next(n for n, reached in enumerate(accumulate(weight)) if reached > target)
        tokens.append(token)
        left[token] = 0.0
        scale = 1.0 / max(*left, LEAST_WEIGHT)
    return tokens


def test_the_reference_reads_as_its_docstring() -> None:
    weights, uniforms = random_weights(24, 30), random_uniforms(24, 5)
    found = draw_siblings(weights, uniforms).tolist()
    pairs = zip(weights.tolist(), uniforms.tolist(), strict=True)
    assert found == [drawn_plainly(*pair) for pair in pairs]
    assert sum(-1 in row for row in found) > 8
    assert sum(-1 not in row for row in found) > 8


@pytest.mark.parametrize(("vocab", "count"), [(30, 5), (300, 3), (300, 1), (9000, 2)])
def test_the_kernel_draws_the_same(
    vocab: int, count: int, device: torch.device, row_backend: Backend
) -> None:
    rows = 12 if vocab < 1000 else 4
    weights, uniforms = random_weights(rows, vocab), random_uniforms(rows, count)
    expected = draw_siblings(weights, uniforms, backend="torch")
    found = draw_siblings(weights.to(device), uniforms.to(device), backend=row_backend)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_rows_that_lie_apart(row_backend: Backend, device: torch.device) -> None:
    weights, uniforms = random_weights(6, 50).to(device), random_uniforms(6, 4).to(device)
    wide = torch.ones(6, 70, device=device)
    wide[:, :50] = weights
    found = draw_siblings(wide[:, :50], uniforms, backend=row_backend)
    assert torch.equal(found, draw_siblings(weights, uniforms, backend="torch"))


@pytest.mark.parametrize("row_backend", ["torch", "triton", "cuda"], indirect=True)
def test_no_token_comes_twice(row_backend: Backend, device: torch.device) -> None:
    weights = torch.tensor([[0.5, LEAST_WEIGHT, 1.0, 0.0, 1e-6]], device=device)
    uniforms = random_uniforms(20, 5).to(device)
    found = draw_siblings(weights.expand(20, -1).contiguous(), uniforms, backend=row_backend)
    for row in found.tolist():
        assert sorted(row[:4]) == [0, 1, 2, 4]
        assert row[4] == -1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_large_vocabularies(vocab: int) -> None:
    weights, uniforms = random_weights(64, vocab), random_uniforms(64, 4)
    found = draw_siblings(weights.cuda(), uniforms.cuda())
    assert found.tolist() == draw_siblings(weights, uniforms).tolist()
