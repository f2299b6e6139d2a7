"""The head with its choice, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels import head_best as module
from specengine.kernels.cuda import program
from specengine.kernels.head_best import head_best, slots_for
from specengine.kernels.norm import rms_norm

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


def is_best(chosen: Tensor, x: Tensor, weight: Tensor) -> None:
    """But for the order of a sum and the rounding of a logit."""
    logits = x.double() @ weight.double().T
    behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
    assert (behind <= 0.01 * logits.abs().max()).all()


@pytest.mark.parametrize(
    ("hidden", "outs"), [(64, 1000), (576, 16384), (576, 49152), (960, 49152), (2048, 5001)]
)
@pytest.mark.parametrize("rows", [1, 4, 9, 24, 32])
def test_the_best_of_each_row(rows: int, hidden: int, outs: int, dtype: torch.dtype) -> None:
    weight, slots = draw(dtype, outs, hidden), slots_for(torch.device("cuda"))
    if not module.can_take(weight[:rows], weight):
        pytest.skip("so many rows of this width do not fit")
    for _ in range(20):
        x = draw(dtype, rows, hidden)
        is_best(head_best(x, weight, slots, backend="cuda"), x, weight)
    assert not slots.any()


def test_with_norm_and_ids(dtype: torch.dtype) -> None:
    x, gain = draw(dtype, 5, 1000)[:, 8:584], draw(dtype, 576)
    weight, slots = draw(dtype, 16000, 576), slots_for(x.device)
    ids = torch.randperm(49152, device="cuda")[:16000]
    chosen = head_best(x, weight, slots, gain, EPS, ids, backend="cuda")
    place = (chosen[:, None] == ids[None, :]).int().argmax(-1)
    assert torch.equal(ids[place], chosen)
    is_best(place, rms_norm(x, gain, EPS), weight)


def test_the_first_among_equals(dtype: torch.dtype) -> None:
    x, weight = draw(dtype, 3, 576), draw(dtype, 1, 576).expand(49152, 576).contiguous()
    slots = slots_for(x.device)
    assert head_best(x, weight, slots, backend="cuda").tolist() == [0, 0, 0]
    weight[[7777, 7778, 40000]] = 2 * x[0]
    assert head_best(x, weight, slots, backend="cuda")[0] == 7777


@pytest.mark.parametrize("outs", [5, 16384, 49152])
def test_logits_below_zero(outs: int, dtype: torch.dtype) -> None:
    x, weight = draw(dtype, 3, 576).abs(), -draw(dtype, outs, 576).abs()
    is_best(head_best(x, weight, slots_for(x.device), backend="cuda"), x, weight)


def test_a_row_keeps_its_choice_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    x = draw(dtype, 32, 576)
    weight = (draw(dtype, 1, 576) + 0.01 * draw(dtype, 16384, 576)).to(dtype)
    slots = slots_for(x.device)
    whole = head_best(x, weight, slots, backend="cuda")
    for rows in (1, 9, 17, 31):
        assert torch.equal(head_best(x[:rows], weight, slots, backend="cuda"), whole[:rows])


def test_launches_behind_each_other(dtype: torch.dtype) -> None:
    """A launch may start before the one ahead has ended; they share their slots."""
    x, weight = draw(dtype, 4, 576), draw(dtype, 16384, 576)
    other, slots = draw(dtype, 4, 576), slots_for(x.device)
    first, second = (head_best(v, weight, slots, backend="cuda") for v in (x, other))
    for _ in range(300):
        assert torch.equal(head_best(x, weight, slots, backend="cuda"), first)
        torch.cuda._sleep(1000)
        for _ in range(5):
            again = head_best(other, weight, slots, backend="cuda")
        assert torch.equal(again, second)
