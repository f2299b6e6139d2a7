"""The head with its choice on a CPU, instruction by instruction, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels import head_best as module
from specengine.kernels import head_best_cuda
from specengine.kernels.cuda.program import Rehearsed
from specengine.kernels.head_best import head_best
from specengine.kernels.norm import rms_norm
from specengine.layers.linear import LMHead
from specengine.layers.norm import RMSNorm
from tests.kernels.emulated_cuda import Compiled

EPS = 1e-5
BLOCKS = 3


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_best_cuda, "compiled", emulated)
    monkeypatch.setattr(head_best_cuda, "multiprocessors", lambda _: BLOCKS)
    monkeypatch.setattr(module, "multiprocessors", lambda _: BLOCKS)
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def slots() -> Tensor:
    return module.slots_for(torch.device("cpu"))


def is_best(chosen: Tensor, x: Tensor, weight: Tensor) -> None:
    """Of the rounded logits, but for the order of a sum."""
    logits = x.float() @ weight.float().T
    behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
    assert (behind <= 0.01 * logits.abs().max()).all()


@pytest.mark.parametrize(
    ("rows", "hidden", "outs"), [(1, 64, 1000), (4, 96, 500), (13, 64, 16), (21, 320, 130)]
)
def test_the_best_of_each_row(rows: int, hidden: int, outs: int) -> None:
    x, weight, room = draw(rows, hidden), draw(outs, hidden), slots()
    for _ in range(2):
        is_best(head_best(x, weight, room, backend="cuda"), x, weight)
    assert not room.any()


def test_with_norm_and_ids() -> None:
    x, gain, weight = draw(5, 72 + 24)[:, :64], draw(64), draw(300, 64)
    ids, room = torch.randperm(1000)[:300], slots()
    chosen = head_best(x, weight, room, gain, EPS, ids, backend="cuda")
    place = (chosen[:, None] == ids[None, :]).int().argmax(-1)
    assert torch.equal(ids[place], chosen)
    is_best(place, rms_norm(x, gain, EPS), weight)


def test_the_first_among_equals() -> None:
    x, weight = draw(3, 64), draw(1, 64).expand(700, 64).contiguous()
    assert head_best(x, weight, slots(), backend="cuda").tolist() == [0, 0, 0]
    better = 2 * x[0]
    weight[[77, 78, 600]] = better
    assert head_best(x, weight, slots(), backend="cuda")[0] == 77


@pytest.mark.parametrize("outs", [5, 40, 1000])
def test_logits_below_zero(outs: int) -> None:
    """Of few outputs most warps see none, and must not speak for them."""
    x, weight = draw(3, 64).abs(), -draw(outs, 64).abs()
    chosen = head_best(x, weight, slots(), backend="cuda")
    is_best(chosen, x, weight)
    endless = torch.full_like(weight, float("-inf"))
    endless[outs // 2] = -1e30
    assert head_best(x, endless, slots(), backend="cuda").tolist() == [outs // 2] * 3


def test_a_row_keeps_its_choice_whatever_stands_beside_it() -> None:
    """Sums have an order of their own: what is nearly level goes the same way for any rows."""
    x = draw(32, 320)
    weight = (draw(1, 320) + 0.01 * draw(400, 320)).bfloat16()
    whole = head_best(x, weight, slots(), backend="cuda")
    for rows in (1, 9, 17):
        assert torch.equal(head_best(x[:rows], weight, slots(), backend="cuda"), whole[:rows])


@pytest.mark.parametrize("with_norm", [False, True], ids=["normed before", "norm"])
def test_a_models_head_takes_it(with_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(module.program, "available", lambda: True)
    head, norm, ids = LMHead(64, 200), RMSNorm(64, EPS), torch.arange(200) * 3
    head.weight = torch.nn.Parameter(draw(200, 64), requires_grad=False)
    norm.weight = torch.nn.Parameter(draw(64), requires_grad=False)
    monkeypatch.setattr(head, "forward", None)
    x = draw(3, 64)
    chosen = head.best(x, norm if with_norm else None, ids)
    is_best(chosen // 3, norm(x) if with_norm else x, head.weight)


def test_what_it_does_not_take() -> None:
    weight = draw(100, 64)
    assert module.can_take(draw(32, 64), weight)
    assert not module.can_take(draw(33, 64), weight)
    assert not module.can_take(draw(0, 64), weight)
    assert not module.can_take(draw(1, 80), draw(100, 80))
    assert not module.can_take(draw(1, 8192), draw(100, 8192))
    assert not module.can_take(draw(32, 4096), draw(100, 4096))
    assert not module.can_take(torch.randn(1, 64), torch.randn(100, 64))
    assert not module.can_take(torch.randn(1, 64), weight)
    assert not module.can_take(draw(2, 68)[:, :64], weight)
    assert not module.can_take(draw(1, 64), draw(100, 72)[:, :64])


def test_a_rehearsal_asks_for_the_forms_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def compiled(
        source: object, name: str, defines: tuple[tuple[str, int], ...], *_: int
    ) -> object:
        asked.add(dict(defines)["NT"])
        return Rehearsed(None)

    monkeypatch.setattr(head_best_cuda, "compiled", compiled)
    head_best(draw(3, 64), draw(100, 64), slots(), backend="cuda")
    assert asked == {1}
    monkeypatch.setattr(head_best_cuda.rehearsal, "current", object)
    head_best(draw(3, 64), draw(100, 64), slots(), backend="cuda")
    assert asked == {1, 2, 4}
