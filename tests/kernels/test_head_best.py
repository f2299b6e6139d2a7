"""The head with its choice, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.head.head_best import head_best, slots_for
from specengine.kernels.linear.norm import rms_norm
from tests.kernels.captured import assert_waits

EPS = 1e-5

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not program.available():
        pytest.skip("cuda-bindings is not installed")
    torch.manual_seed(0)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def small(dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers: sums of their products are exact, and their roundings often equal."""
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


def best_of(x: Tensor, weight: Tensor) -> Tensor:
    """The first of the largest rounded logits."""
    return (x.double() @ weight.double().T).to(x.dtype).argmax(-1)


@pytest.mark.parametrize(
    ("hidden", "outs"), [(64, 1000), (576, 16384), (576, 49152), (960, 49152), (4096, 5001)]
)
@pytest.mark.parametrize("rows", [1, 4, 9, 16])
def test_the_best_of_each_row(rows: int, hidden: int, outs: int, dtype: torch.dtype) -> None:
    weight, slots = small(dtype, outs, hidden), slots_for(torch.device("cuda"))
    for _ in range(20):
        x = small(dtype, rows, hidden)
        assert torch.equal(head_best(x, weight, slots, backend="cuda"), best_of(x, weight))
    assert not slots.any()


def test_with_norm_and_ids(dtype: torch.dtype) -> None:
    x, gain = draw(dtype, 5, 1000)[:, 8:584], draw(dtype, 576)
    weight, slots = torch.eye(576, device="cuda").to(dtype), slots_for(x.device)
    ids = torch.randperm(49152, device="cuda")[:576]
    logits = rms_norm(x, gain, EPS, backend="torch")
    place = (head_best(x, weight, slots, gain, EPS, ids, backend="cuda")[:, None] == ids).nonzero()
    behind = logits.max(-1).values - logits.gather(1, place[:, 1:])[:, 0]
    assert (behind <= 0.01 * logits.abs().max()).all()


def test_the_first_among_equals(dtype: torch.dtype) -> None:
    x, weight = draw(dtype, 3, 576), draw(dtype, 1, 576).expand(49152, 576).contiguous()
    slots = slots_for(x.device)
    assert head_best(x, weight, slots, backend="cuda").tolist() == [0, 0, 0]
    weight[[7777, 7778, 40000]] = 2 * x[0]
    torch.cuda.synchronize()  # weights are read before the kernel ahead has ended
    assert head_best(x, weight, slots, backend="cuda")[0] == 7777


@pytest.mark.parametrize("outs", [5, 16384, 49152])
def test_logits_below_zero(outs: int, dtype: torch.dtype) -> None:
    """Some warps see none of 16,384 outputs."""
    x, weight = small(dtype, 3, 576).abs() + 1, -small(dtype, outs, 576).abs() - 1
    chosen = head_best(x, weight, slots_for(x.device), backend="cuda")
    assert torch.equal(chosen, best_of(x, weight))


def test_a_row_keeps_its_choice_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    x = draw(dtype, 16, 576)
    weight = (draw(dtype, 1, 576) + 0.01 * draw(dtype, 16384, 576)).to(dtype)
    slots = slots_for(x.device)
    whole = head_best(x, weight, slots, backend="cuda")
    for rows in (1, 7, 9):
        assert torch.equal(head_best(x[:rows], weight, slots, backend="cuda"), whole[:rows])


def test_it_waits_for_what_comes_before_it(dtype: torch.dtype) -> None:
    """And calls share their slots."""
    source, weight = draw(dtype, 4, 576), draw(dtype, 16384, 576)
    slots = slots_for(source.device)
    assert_waits(source, lambda rows: (head_best(rows, weight, slots, backend="cuda"),))
