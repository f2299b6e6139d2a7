"""The head with its choice on a CPU, instruction by instruction, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.head import head_best as module
from specengine.kernels.head import head_best_cuda, head_stream
from specengine.kernels.head.head_best import head_best
from specengine.kernels.linear.norm import rms_norm
from specengine.layers.head import Head
from specengine.layers.linear import LMHead
from specengine.layers.norm import RMSNorm
from tests.halves import slow_but
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.emulated_head import emulate_head, forms_asked_for, let_heads_take_it

EPS = 1e-5


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_head(emulated, 3, monkeypatch)
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    """Small whole numbers: sums of their products are exact, and their roundings often equal."""
    return torch.randint(-3, 4, shape).bfloat16()


def slots() -> Tensor:
    return module.slots_for(torch.device("cpu"))


def best_of(x: Tensor, weight: Tensor) -> Tensor:
    """The first of the largest rounded logits."""
    return (x.float() @ weight.float().T).bfloat16().argmax(-1)


SIZES = [(1, 64, 1000), (4, 96, 500), (13, 64, 16), (9, 320, 1000), (16, 960, 500), (2, 32, 4000)]


@pytest.mark.parametrize(("rows", "hidden", "outs"), slow_but(SIZES[1:5], SIZES))
def test_the_best_of_each_row(rows: int, hidden: int, outs: int) -> None:
    x, weight, room = draw(rows, hidden), draw(outs, hidden), slots()
    for _ in range(2):
        assert torch.equal(head_best(x, weight, room, backend="cuda"), best_of(x, weight))
    assert not room.any()


def test_with_norm_and_ids() -> None:
    x, gain = torch.randn(5, 96).bfloat16()[:, :64], torch.randn(64).bfloat16()
    weight, ids, room = torch.eye(64).bfloat16(), torch.randperm(1000)[:64], slots()
    chosen = head_best(x, weight, room, gain, EPS, ids, backend="cuda")
    assert torch.equal(chosen, ids[rms_norm(x, gain, EPS).argmax(-1)])


def test_calls_of_any_size_share_their_slots() -> None:
    weight, room = draw(300, 64), slots()
    for rows in (1, 16, 5, 9):
        x = draw(rows, 64)
        assert torch.equal(head_best(x, weight, room, backend="cuda"), best_of(x, weight))


def test_more_blocks_than_are_looked_at_in_one_go(
    emulated: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_head(emulated, 150, monkeypatch)
    x, weight = draw(16, 32), draw(150 * 8 * 16, 32)
    assert torch.equal(head_best(x, weight, slots(), backend="cuda"), best_of(x, weight))


@pytest.mark.parametrize("outs", [5, 40, 1000])
def test_logits_below_zero(outs: int) -> None:
    """Where outputs are few, most warps see none, and must not speak for them."""
    x, weight = draw(3, 64).abs() + 1, -draw(outs, 64).abs() - 1
    assert torch.equal(head_best(x, weight, slots(), backend="cuda"), best_of(x, weight))
    endless = torch.full_like(weight, float("-inf"))
    endless[outs // 2] = -1e30
    assert head_best(x, endless, slots(), backend="cuda").tolist() == [outs // 2] * 3


def test_a_row_keeps_its_choice_whatever_stands_beside_it() -> None:
    """Sums have an order of their own: what is nearly level goes the same way for any rows."""
    x = torch.randn(16, 320).bfloat16()
    weight = (torch.randn(1, 320) + 0.01 * torch.randn(400, 320)).bfloat16()
    whole = head_best(x, weight, slots(), backend="cuda")
    assert len(set(whole.tolist())) > 1
    for rows in (1, 7, 9):
        assert torch.equal(head_best(x[:rows], weight, slots(), backend="cuda"), whole[:rows])


class TestOfAModel:
    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        let_heads_take_it(monkeypatch)

    def head(self, bias: bool = False) -> LMHead:
        head = LMHead(64, 200, bias)
        head.weight = torch.nn.Parameter(draw(200, 64), requires_grad=False)
        if bias:
            head.bias = torch.nn.Parameter(draw(200), requires_grad=False)
        return head

    @pytest.mark.parametrize("with_norm", [False, True], ids=["normed before", "norm"])
    def test_it_takes_the_kernel(self, with_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        head, norm, ids = self.head(), RMSNorm(64, EPS), torch.arange(200) * 3
        norm.weight = torch.nn.Parameter(draw(64), requires_grad=False)
        x = draw(3, 64)
        logits = head(norm(x) if with_norm else x).float()
        monkeypatch.setattr(head, "forward", None)
        chosen = Head(head, norm=norm if with_norm else None, ids=ids).best(x) // 3
        behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        assert (behind <= 0.01 * logits.abs().max()).all()

    @pytest.mark.parametrize(("rows", "bias"), [(3, True), (17, False)], ids=["bias", "many rows"])
    def test_what_it_leaves_to_others(
        self, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "head_best", None)
        head, x = self.head(bias), draw(rows, 64)
        assert torch.equal(Head(head).best(x), head(x).argmax(-1))


def test_what_it_does_not_take() -> None:
    weight = draw(100, 64)
    assert head_stream.can_take(draw(16, 64), weight)
    assert not head_stream.can_take(draw(17, 64), weight)
    assert not head_stream.can_take(draw(0, 64), weight)
    assert not head_stream.can_take(draw(1, 32), weight)
    assert not head_stream.can_take(draw(1, 80), draw(100, 80))
    assert not head_stream.can_take(draw(1, 8192), draw(100, 8192))
    assert not head_stream.can_take(torch.randn(1, 64), torch.randn(100, 64))
    assert not head_stream.can_take(torch.randn(1, 64), weight)
    assert not head_stream.can_take(draw(2, 68)[:, :64], weight)
    assert not head_stream.can_take(draw(1, 64), draw(100, 72)[:, :64])


def test_precompiling_asks_for_the_forms_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = forms_asked_for(head_best_cuda, monkeypatch)
    head_best(draw(3, 64), draw(100, 64), slots(), backend="cuda")
    assert asked == {1}
    monkeypatch.setattr(head_stream.precompile, "current", object)
    head_best(draw(3, 64), draw(100, 64), slots(), backend="cuda")
    assert asked == {1, 2}
