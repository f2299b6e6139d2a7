"""The head with the best tokens and the log-sum-exp by block: on a GPU, or elsewhere instruction by
instruction on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.head import head_stream, head_topk_cuda
from specengine.kernels.head.head_topk import can_take, head_topk
from specengine.kernels.head.head_topk_ref import partials_of
from specengine.kernels.head.types import BlockPartials
from specengine.kernels.linear import few_row
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Beams, Found
from specengine.layers.head import Head
from specengine.layers.linear import LMHead
from specengine.layers.norm import RMSNorm
from tests.halves import each_value
from tests.kernels.captured import assert_waits, capture
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.emulated_head import emulate_head, forms_asked_for, let_heads_take_it

EPS = 1e-5
BLOCKS = 3  # where there is no GPU
MINUS_INFINITY = float("-inf")


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.bfloat16), id="emulated"),
        pytest.param(("cuda", torch.bfloat16), id="bf16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16), id="fp16", marks=pytest.mark.gpu),
    ]
)
def like(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Device and dtype of what the kernel takes."""
    device, dtype = request.param
    if torch.cuda.is_available() != (device == "cuda"):
        pytest.skip("the other kind of machine")
    if device == "cpu":
        emulate_head(request.getfixturevalue("emulated"), BLOCKS, monkeypatch)
    elif not program.available():
        pytest.skip("cuda-bindings is not installed")
    torch.manual_seed(0)
    return torch.empty(0, dtype=dtype, device=device)


def draw(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, device=like.device).to(like.dtype)


def small(like: Tensor, *shape: int) -> Tensor:
    """Small whole numbers: sums of their products are exact, and their roundings often equal."""
    return torch.randint(-3, 4, shape, device=like.device).to(like.dtype)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


def run(
    x: Tensor, weight: Tensor, topk: int, norm_weight: Tensor | None = None, eps: float = 0.0
) -> BlockPartials:
    return head_topk(x, weight, topk, norm_weight, eps, backend="cuda")


def assert_tells(partials: BlockPartials, logits: Tensor, topk: int) -> None:
    """The best exactly, each of them once and falling within a block; and the log-sum-exp."""
    columns, values = partials.best()
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(columns, expected.indices[:, :topk])
    assert torch.equal(values, expected.values[:, :topk])
    ours = torch.arange(partials.keys_RSK.shape[1], device=columns.device)[None, :, None]
    owners = (2**31 - 1 - (partials.keys_RSK & (2**31 - 1))) // partials.width % ours.numel()
    assert ((owners == ours) | (partials.keys_RSK == 0)).all()
    falls = partials.keys_RSK[..., 1:] < partials.keys_RSK[..., :-1]
    assert (falls | (partials.keys_RSK[..., 1:] == 0)).all()
    apart = partials_of(logits, topk, ours.numel(), partials.width)
    torch.testing.assert_close(partials.sums_RS2, apart.sums_RS2)
    torch.testing.assert_close(partials.log_sums(), logits.float().logsumexp(-1))


@pytest.mark.parametrize(
    ("rows", "hidden", "outs", "topk"),
    each_value(
        1,
        [(1, 64, 1000), (4, 96, 500), (13, 64, 40), (9, 320, 1000), (16, 960, 500), (2, 32, 4000)],
        [1, 4, 32],
    ),
)
def test_the_best_and_the_sum(like: Tensor, rows: int, hidden: int, outs: int, topk: int) -> None:
    x, weight = small(like, rows, hidden), small(like, outs, hidden)
    assert_tells(run(x, weight, topk), logits_of(x, weight), topk)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "outs"), [(576, 16384), (576, 49152), (4096, 32000), (4096, 128256)]
)
def test_heads_of_models(like: Tensor, hidden: int, outs: int) -> None:
    if not like.is_cuda:
        pytest.skip("takes the emulator minutes")
    weight = small(like, outs, hidden)
    for rows in (1, 4, 9, 16):
        for _ in range(5):
            x = small(like, rows, hidden)
            assert_tells(run(x, weight, 4), logits_of(x, weight), 4)


def test_behind_a_norm(like: Tensor) -> None:
    x, gain = draw(like, 5, 96)[:, :64], draw(like, 64)
    weight = torch.eye(64, device=like.device).to(like.dtype)
    told = run(x, weight, 4, gain, EPS)
    normed = rms_norm(x, gain, EPS, backend="torch")
    near = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(told.best()[1], normed.float().topk(4).values, **near)
    torch.testing.assert_close(told.log_sums(), normed.float().logsumexp(-1), **near)


def test_what_the_head_says_where_there_is_no_kernel() -> None:
    torch.manual_seed(0)
    x, weight, gain = torch.randn(3, 64), torch.randn(300, 64), torch.randn(64)
    told = head_topk(x, weight, 5, gain, EPS)
    logits = rms_norm(x, gain, EPS) @ weight.T
    assert torch.equal(told.best()[0], logits.topk(5).indices)
    torch.testing.assert_close(told.log_sums(), logits.logsumexp(-1))


@pytest.mark.parametrize(("num_blocks", "width"), [(1, 1), (3, 1), (3, 4), (7, 2), (50, 1)])
def test_partials_of_logits(num_blocks: int, width: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-5, 6, (4, 40)).float()
    logits[2] = -logits[2].abs() - 300
    logits[3, :30] = MINUS_INFINITY
    partials = partials_of(logits, 4, num_blocks, width)
    assert partials.keys_RSK.shape == (4, num_blocks, 4)
    assert_tells(partials, logits, 4)


@pytest.mark.parametrize("outs", [5, 40, 1000])
def test_logits_below_zero(like: Tensor, outs: int) -> None:
    """Where outputs are few, most warps see none, and must not speak for them."""
    x, weight = small(like, 3, 64).abs() + 1, -small(like, outs, 64).abs() - 1
    assert_tells(run(x, weight, 5), logits_of(x, weight), 5)


def test_outputs_that_cannot_be(like: Tensor) -> None:
    x, weight = small(like, 3, 64).abs() + 1, torch.full_like(draw(like, 300, 64), MINUS_INFINITY)
    weight[[30, 170]] = torch.tensor([[-2.0], [-3.0]], device=like.device).to(like.dtype)
    told = run(x, weight, 3)
    logits = logits_of(x, weight)
    assert told.best()[0][:, :2].tolist() == [[30, 170]] * 3
    torch.testing.assert_close(told.log_sums(), logits.float().logsumexp(-1))


def test_minus_zero_is_zero(like: Tensor) -> None:
    """Logits below zero that half precision has no number for."""
    x, weight = torch.zeros(1, 32), torch.zeros(50, 32)
    x[0, 0], weight[:, 0] = (2**-60, -(2.0**-75)) if like.dtype == torch.bfloat16 else (1e-4, -1e-4)
    weight[7] = 0.0
    x, weight = (one.to(like.device, like.dtype) for one in (x, weight))
    assert run(x, weight, 3).best()[0].tolist() == [[0, 1, 2]]


def test_a_row_keeps_its_shares_whatever_stands_beside_it(like: Tensor) -> None:
    x, weight = draw(like, 16, 320), draw(like, 400, 320)
    whole = run(x, weight, 4)
    for rows in (1, 7, 9):
        part = run(x[:rows], weight, 4)
        assert torch.equal(part.keys_RSK, whole.keys_RSK[:rows])
        assert torch.equal(part.sums_RS2, whole.sums_RS2[:rows])


@pytest.mark.gpu
def test_it_waits_for_what_comes_before_it(like: Tensor) -> None:
    if not like.is_cuda:
        pytest.skip("no graphs")
    weight = draw(like, 16384, 576)

    def told(rows: Tensor) -> tuple[Tensor, Tensor]:
        partials = run(rows, weight, 4)
        return partials.keys_RSK, partials.sums_RS2

    assert_waits(draw(like, 4, 576), told)


@pytest.mark.gpu
def test_trees_wait_for_their_shares(like: Tensor) -> None:
    """In a graph: growth begins beside the head's kernel."""
    if not like.is_cuda:
        pytest.skip("no graphs")
    weight, topk, steps = draw(like, 16384, 576), 4, 3
    states = [draw(like, 1 if step == 0 else topk, 576) for step in range(steps)]
    counters = torch.zeros(1, dtype=torch.int32, device=like.device)
    found = Found.of(1, topk, steps, weight.device)
    told: list[BlockPartials] = []

    def grow() -> None:
        told.clear()
        beams: Beams | None = None
        for x in states:
            told.append(run(few_row.linear(x, identity, backend="cuda"), weight, topk))
            beams = tree_step(told[-1], beams, found, topk, counters)

    identity = torch.eye(576, device="cuda").to(like.dtype)
    graph = capture(grow)
    for _ in range(100):
        for x in states:
            x.copy_(draw(like, *x.shape))
        graph.replay()
        torch.cuda.synchronize()
        again, beams = Found.of(1, topk, steps, weight.device), None
        for partials in told:
            beams = tree_step(partials, beams, again, topk, counters)
            torch.cuda.synchronize()
        assert torch.equal(found.tokens_BC, again.tokens_BC)
        assert torch.equal(found.scores_BC, again.scores_BC)
        assert torch.equal(found.parents_BC, again.parents_BC)


def test_what_it_does_not_take() -> None:
    def half(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    assert can_take(half(16, 64), half(100, 64), 4)
    assert not can_take(half(17, 64), half(100, 64), 4)
    assert not can_take(half(16, 64), half(100, 64), 33)
    assert not can_take(half(16, 64), half(100, 64), 0)
    assert not can_take(half(16, 64), half(100, 64).float(), 4)
    assert can_take(half(1, 64), half(4096, 64), 4)
    assert not can_take(half(1, 64), half(4097, 64), 4), "a lane cannot hold so many"
    assert can_take(half(8, 4096), half(4096, 4096), 4)
    assert not can_take(half(16, 4096), half(4096, 4096), 4), "a block cannot keep so many"


class TestOfAModel:
    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
        emulate_head(emulated, BLOCKS, monkeypatch)
        let_heads_take_it(monkeypatch)
        torch.manual_seed(0)

    def head(self, bias: bool = False) -> LMHead:
        like = torch.empty(0, dtype=torch.bfloat16)
        head = LMHead(64, 200, bias)
        head.weight = torch.nn.Parameter(small(like, 200, 64), requires_grad=False)
        return head

    def test_it_takes_the_kernel(self) -> None:
        head, norm = self.head(), RMSNorm(64, EPS)
        norm.weight = torch.nn.Parameter(torch.ones(64).bfloat16(), requires_grad=False)
        x = small(norm.weight, 3, 64)
        told = Head(head).top(x, 4)
        assert told is not None
        assert told.keys_RSK.shape == (3, BLOCKS, 4)
        assert_tells(told, head(x), 4)
        normed = Head(head, norm=norm).top(x, 4)
        assert normed is not None
        torch.testing.assert_close(
            normed.log_sums(), head(norm(x)).float().logsumexp(-1), rtol=0.02, atol=0.02
        )

    @pytest.mark.parametrize(("rows", "bias"), [(3, True), (17, False)], ids=["bias", "many rows"])
    def test_what_it_leaves_to_others(self, rows: int, bias: bool) -> None:
        head = self.head(bias)
        assert Head(head).top(small(head.plain, rows, 64), 4) is None


def test_precompiling_asks_for_the_forms_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = forms_asked_for(head_topk_cuda, monkeypatch)
    monkeypatch.setattr(head_topk_cuda, "multiprocessors", lambda _: BLOCKS)
    x, weight = torch.zeros(3, 64).bfloat16(), torch.zeros(100, 64).bfloat16()
    run(x, weight, 4)
    assert asked == {1}
    monkeypatch.setattr(head_stream.precompile, "current", object)
    run(x, weight, 4)
    assert asked == {1, 2}
    asked.clear()
    run(torch.zeros(3, 4096).bfloat16(), torch.zeros(12_000, 4096).bfloat16(), 4)
    assert asked == {1}, "16 rows would have no room"
