"""The shared expert on a stream of its own: where that is allowed, in which order, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specengine.core.platforms.cuda import CudaPlatform
from specengine.core.platforms.cuda_streams import CaptureStreams
from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts.packed import PackedExperts
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.layers import side_stream
from specengine.layers.layer_spec import ExpertsSpec
from specengine.layers.norm import RMSNorm
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.side_stream import both, side_streams
from specengine.layers.sparse_mlp import SparseMLP
from specengine.runner.capture import capture, capture_parts, capturing_on
from tests.support.fake_platform import FakePlatform, FakeStream

HIDDEN, WIDE, INNER, BLOCK, LAYERS = 512, 2048, 256, 128, 4


class Rows:
    """What `both` asks of rows on a GPU."""

    is_cuda, device = True, torch.device("cuda:0")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on which stream."""
    streams, found = ["main"], list[str]()

    class Stream:
        cuda_stream = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            found.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        streams.append(stream.name)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(streams[-1]))
    monkeypatch.setattr(torch.cuda, "stream", on)
    streams_of = {0: CaptureStreams(Stream("main"), Stream("side"))}  # type: ignore[arg-type]
    monkeypatch.setattr(side_stream, "capture_streams", streams_of.__getitem__)
    found_on = found.append
    monkeypatch.setattr(Rows, "run", lambda _, name: found_on(f"{name} on {streams[-1]}"), False)
    return found


def run_both(count: int = 5, fails: bool = False) -> None:
    def first(x: Any) -> Any:
        x.run("first")
        if fails:
            raise RuntimeError("out of memory")

    both(Rows(count), first, lambda x: x.run("second"))  # type: ignore[arg-type]


IN_TURN = ["first on main", "second on main"]
BESIDE = ["side waits for main", "second on side", "first on main", "main waits for side"]


def test_both_run_beside_each_other_only_where_that_is_allowed(log: list[str]) -> None:
    run_both()
    with side_streams(True):
        run_both()
        with side_streams(False):
            run_both()
    run_both()
    assert log == [*IN_TURN, *BESIDE, *IN_TURN, *IN_TURN]


def test_many_rows_run_in_turn(log: list[str]) -> None:
    with side_streams(True):
        run_both(257)
    assert log == IN_TURN


def test_a_mixture_on_a_cpu_is_the_same_where_streams_are_allowed() -> None:
    stack, x = Stack(), torch.randn(3, HIDDEN)
    with torch.inference_mode():
        expected = stack(x)
        with side_streams(True):
            assert torch.equal(stack(x), expected)


def test_streams_join_where_the_first_part_fails(log: list[str]) -> None:
    with side_streams(True), pytest.raises(RuntimeError, match="out of memory"):
        run_both(fails=True)
    assert log == BESIDE


def test_an_invalid_capture_raises_what_made_it_so(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Invalid:
        cuda_stream = 1
        name = "main"

        def wait_stream(self, other: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Invalid())
    with side_streams(True), pytest.raises(RuntimeError, match="out of memory"):
        run_both(fails=True)
    assert log == BESIDE[:-1]


def test_captures_on_all_multiprocessors_alone_have_branches(log: list[str]) -> None:
    """Also the warm-up before, which makes what the second stream keeps."""
    fake = FakePlatform()
    capture(run_both, fake.graph_pool(), fake)
    capture_parts([run_both], fake.graph_pool(), fake)
    assert log == BESIDE * 4
    log.clear()
    with capturing_on(FakeStream(7)):  # type: ignore[arg-type]
        capture(run_both, fake.graph_pool(), fake)
    assert log == IN_TURN * 2


Form = Callable[[Tensor], Fp8Weight]


def in_blocks(weight: Tensor) -> Fp8Weight:
    rows, columns = weight.shape
    scale = torch.rand(rows // BLOCK, columns // BLOCK, device=weight.device) + 0.5
    return Fp8Weight(weight.to(FP8), scale, BLOCK, BLOCK, Fp8Input(group=BLOCK))


class Stack(nn.Module):
    """Mixtures with a shared expert behind norms, as rounds run them."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        spec = ExpertsSpec(32, 4, INNER, shared_size=INNER, shared_gate=True)
        self.mlps = nn.ModuleList(SparseMLP(hidden, spec) for _ in range(LAYERS))
        self.norms = nn.ModuleList(RMSNorm(hidden, 1e-6) for _ in range(LAYERS))
        for name, one in self.named_parameters():
            torch.nn.init.ones_(one) if "norms" in name else torch.nn.init.normal_(one, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        out, stream = x, None
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            normed, stream = norm.add(out, stream, mlp.takes)
            out = mlp.parts(normed)
        return self.norms[0].add(out, stream)[0]


def quantise_shared(mlp: Any, form: Form) -> None:
    for one in (mlp.shared_expert.gate_up_proj, mlp.shared_expert.down_proj):
        kernel = QuantisedLinear([form(one.plain)], None)
        one.use_kernel(kernel, kernel.takes)


def quantise_experts(mlp: Any, form: Form) -> None:
    weights, made = mlp.experts.weights, []
    for weight in (weights.gate_up, weights.down):
        each = (form(part) for part in weight)
        packed = PackedExperts.of(load_place(EXPERT_FORMATS["fp8"]), len(weight), each)
        assert packed is not None
        made.append(packed)
    mlp.experts.use_packed(*made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("starts", ["before routing", "behind"])
@pytest.mark.parametrize("form", [None, in_blocks, Fp8Weight.of])
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_captured_branches_leave_bits(
    rows: int, form: Form | None, starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of wide rows are split into sums, whose counters are of a stream."""
    hidden = HIDDEN if form is None else WIDE
    torch.manual_seed(0)
    is_first = starts == "before routing"
    monkeypatch.setattr(SparseMLP, "_shared_starts_first", lambda self: is_first)
    platform, stack = CudaPlatform(), Stack(hidden).cuda().bfloat16()
    for mlp in stack.mlps if form else ():
        quantise_shared(mlp, form)
        quantise_experts(mlp, form)
    given = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16).normal_()
    pool = platform.graph_pool()
    beside, found = capture(lambda: stack(given), pool, platform)
    monkeypatch.setattr(side_stream, "_MOST_ROWS", 0)
    in_turn, expected = capture(lambda: stack(given), platform.graph_pool(), platform)
    for _ in range(100):
        given.normal_()
        for graph in (beside, in_turn, beside):  # the first after other kernels, and after itself
            graph.replay()
        assert torch.equal(found, expected)
    assert expected.float().std() > 0.1
