"""Routing in Triton against the reference, which tests/target compares with transformers, and one
launch against two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.experts import route_ref, route_triton
from specengine.kernels.experts.route import route
from specengine.kernels.experts.types import Chosen, Router, Routing

HIDDEN = 80
MOST_TOGETHER = 32  # rows, whatever the rule in force is

ROUTINGS = {
    "softmax": (12, Routing(3)),
    "softmax, not normalised": (12, Routing(4, normalised=False, scaling=2.5)),
    "sigmoid": (9, Routing(2, scores="sigmoid", scaling=1.5)),
    "one": (6, Routing(1, scores="sigmoid", normalised=False)),
    "groups": (15, Routing(4, scores="sigmoid", num_groups=5, num_chosen_groups=2)),
    "groups of one": (4, Routing(2, num_groups=4, num_chosen_groups=3)),
}


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and correction"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_in_triton_equals_reference(name: str, extras: bool, device: torch.device) -> None:
    count, routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 300, generator=generator).to(device)
    weight = (0.1 * torch.randn(count, 300, generator=generator)).to(device)
    bias, correction = (
        torch.randn(2, count, generator=generator).to(device) if extras else (None, None)
    )
    router = Router(weight, bias, correction)
    expected = route(x, router, routing, backend="torch")
    found = route(x, router, routing, backend="triton")
    assert torch.equal(found.ids_TK, expected.ids_TK)
    torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_of_equal_scores_the_first_expert_is_chosen(backend: Any, device: torch.device) -> None:
    x, weight = torch.ones(2, 32, device=device), torch.ones(6, 32, device=device)
    found = route(x, Router(weight), Routing(3), backend=backend)
    assert found.ids_TK.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(found.weights_TK, torch.full((2, 3), 1 / 3, device=device))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under the interpreter
def test_a_row_without_numbers_has_different_experts(
    value: float, name: str, backend: Any, device: torch.device
) -> None:
    """Kernels count the rows of an expert by it, and write as many."""
    count, routing = ROUTINGS[name]
    weight = torch.ones(count, HIDDEN, device=device)
    x = torch.full((2, HIDDEN), value, device=device)
    ids = route(x, Router(weight), routing, backend=backend).ids_TK.tolist()
    assert all(len({*row}) == routing.num_chosen and {*row} <= {*range(count)} for row in ids)


def test_routing_by_hand() -> None:
    """Two groups of two: the second group's sum is larger, though the first has the best expert."""
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0]])
    routing = Routing(2, scores="sigmoid", num_groups=2, num_chosen_groups=1, scaling=2.0)
    found = route(logits, Router(torch.eye(4)), routing)
    assert found.ids_TK.tolist() == [[2, 3]]
    torch.testing.assert_close(found.weights_TK, torch.ones(1, 2))


class _NoKernel:
    """A kernel that must not be launched."""

    def __getitem__(self, grid: object) -> Any:
        pytest.fail("launched")


def draw(
    rows: int, count: int, device: torch.device, extras: bool, hidden: int = 600
) -> tuple[Tensor, Router]:
    """float16, whose products few rows take in one launch. The inputs are more than one part."""
    generator = torch.Generator().manual_seed(rows + count)
    x = torch.randn(rows, hidden, generator=generator).half().to(device)
    weight = (0.1 * torch.randn(count, hidden, generator=generator)).half().to(device)
    bias, correction = torch.randn(2, count, generator=generator).to(device)
    return x, Router(weight, bias.half(), correction) if extras else Router(weight)


def in_one(x: Tensor, router: Router, routing: Routing, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    with monkeypatch.context() as patch:
        patch.setattr(route_triton, "MOST_TOGETHER", MOST_TOGETHER)
        patch.setattr(route_triton, "_choose_kernel", _NoKernel())
        return route_triton.route(x, router, routing)


def in_two(x: Tensor, router: Router, routing: Routing, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    with monkeypatch.context() as patch:
        patch.setattr(route_triton, "MOST_TOGETHER", 0)
        patch.setattr(route_triton, "_route_kernel", _NoKernel())
        return route_triton.route(x, router, routing)


def assert_same(found: Chosen, expected: Chosen) -> None:
    assert torch.equal(found.ids_TK, expected.ids_TK)
    assert torch.equal(found.weights_TK, expected.weights_TK)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and correction"])
@pytest.mark.parametrize("name", [*ROUTINGS, "many experts"])
def test_one_launch_gives_the_bits_of_two(
    name: str, extras: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, and two tiles of rows of which one is not full."""
    count, routing = ROUTINGS.get(name, (40, Routing(6)))
    for rows in (3, 18):
        x, router = draw(rows, count, device, extras)
        found = in_one(x, router, routing, monkeypatch)
        assert_same(found, in_two(x, router, routing, monkeypatch))
        bias = 0.0 if router.bias is None else router.bias.float()
        logits = x.float() @ router.weight.float().T + bias
        expected = route_ref.choose(logits, router.correction, routing)
        assert torch.equal(found.ids_TK, expected.ids_TK)
        torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 16, 32])
def test_a_row_in_one_launch_does_not_depend_on_others(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, router = draw(MOST_TOGETHER + 1, 40, device, extras=False)
    many = in_two(x, router, Routing(6), monkeypatch)
    few = in_one(x[:rows], router, Routing(6), monkeypatch)
    assert_same(few, Chosen(many.ids_TK[:rows], many.weights_TK[:rows]))


@pytest.mark.parametrize("launches", [1, 3])
def test_counts_of_programs_serve_launches_of_any_shape(
    launches: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, turn = route_triton._counts_of(device), route_triton._TURN.value
    before = counts.clone()
    for _ in range(launches):
        for rows, count, hidden in ((1, 8, 80), (20, 40, 600), (2, 70, 1200)):
            x, router = draw(rows, count, device, True, hidden)
            found = in_one(x, router, Routing(4), monkeypatch)
            assert_same(found, in_two(x, router, Routing(4), monkeypatch))
            assert not (counts % turn).any()
    assert (counts - before).tolist()[:3] == [3 * launches * turn, launches * turn, 0]


def test_counts_that_wrap_around_choose_as_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = route_triton._counts_of(device)
    x, router = draw(20, 40, device, extras=False)
    expected = in_two(x, router, Routing(4), monkeypatch)
    counts.fill_(2**31 - route_triton._TURN.value)
    for _ in range(2):
        assert_same(in_one(x, router, Routing(4), monkeypatch), expected)
    assert counts[:2].tolist() == [route_triton._TURN.value - 2**31] * 2
    counts.zero_()


@pytest.mark.parametrize("form", ["float32", "many rows"])
def test_what_one_launch_does_not_take_is_routed_in_two(
    form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, router = draw(MOST_TOGETHER + 1 if form == "many rows" else 2, 12, device, extras=False)
    if form == "float32":
        x, router = x.float(), Router(router.weight.float())
    monkeypatch.setattr(route_triton, "MOST_TOGETHER", MOST_TOGETHER)
    monkeypatch.setattr(route_triton, "_route_kernel", _NoKernel())
    found = route_triton.route(x, router, Routing(3))
    expected = route_ref.choose(x.float() @ router.weight.float().T, None, Routing(3))
    assert torch.equal(found.ids_TK, expected.ids_TK)


def test_streams_have_counts_of_their_own(device: torch.device) -> None:
    own = route_triton._counts_of(device)
    assert route_triton._counts_of(device) is own
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            assert route_triton._counts_of(device) is not own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_replays_on_streams_beside_each_other_choose_the_same(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_triton, "MOST_TOGETHER", MOST_TOGETHER)
    device = torch.device("cuda")
    x, router = draw(rows, 512, device, True, 2048)
    expected = route_triton.route(x, router, Routing(10))
    made = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            route_triton.route(x, router, Routing(10))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = [route_triton.route(x, router, Routing(10)) for _ in range(50)]
            made.append((stream, graph, found))
    for _ in range(20):
        for stream, graph, _found in made:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _stream, _graph, found in made:
        for one in found:
            assert_same(one, expected)
