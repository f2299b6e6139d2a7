"""Routing in Triton against the reference, which tests/target compares with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.experts import route_ref, route_triton
from specengine.kernels.experts.route import route
from specengine.kernels.experts.types import Router, Routing
from tests.halves import each_value

HIDDEN = 80

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


def draw(rows: int, count: int, device: torch.device, extras: bool) -> tuple[Tensor, Router]:
    """float16. The inputs are more than one part."""
    generator = torch.Generator().manual_seed(rows + count)
    x = torch.randn(rows, 600, generator=generator).half().to(device)
    weight = (0.1 * torch.randn(count, 600, generator=generator)).half().to(device)
    bias, correction = torch.randn(2, count, generator=generator).to(device)
    return x, Router(weight, bias.half(), correction) if extras else Router(weight)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and correction"])
@pytest.mark.parametrize("name", [*ROUTINGS, "many experts"])
def test_routing_of_float16_rows_equals_reference_of_float32(
    name: str, extras: bool, device: torch.device
) -> None:
    """Three rows, and two tiles of rows of which one is not full."""
    count, routing = ROUTINGS.get(name, (40, Routing(6)))
    for rows in (3, 18):
        x, router = draw(rows, count, device, extras)
        found = route_triton.route(x, router, routing)
        bias = 0.0 if router.bias is None else router.bias.float()
        logits = x.float() @ router.weight.float().T + bias
        expected = route_ref.choose(logits, router.correction, routing)
        assert torch.equal(found.ids_TK, expected.ids_TK)
        torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "least_many"), each_value(1, [1, 5, 16, 32], [512, 33]))
def test_routing_of_a_row_does_not_depend_on_others(
    rows: int, least_many: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least_many: 512 for one tile, 33 where more rows take other ones."""
    monkeypatch.setattr(route_triton, "_MANY", least_many)
    x, router = draw(33, 40, device, extras=False)
    many = route_triton.route(x, router, Routing(6))
    few = route_triton.route(x[:rows], router, Routing(6))
    assert torch.equal(few.ids_TK, many.ids_TK[:rows])
    assert torch.equal(few.weights_TK, many.weights_TK[:rows])


@pytest.mark.parametrize("rows", [1, 20])
def test_routing_among_dozens_equals_that_of_few(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dozens of rows of many experts take larger tiles."""
    monkeypatch.setattr(route_triton, "_DOZENS", 34)
    monkeypatch.setattr(route_triton, "_PROGRAMS", 12)
    x, router = draw(35, 70, device, extras=False)
    tiles = [route_triton._logits_tile(one, 70, 2) for one in (x, x[:rows])]
    assert tiles == [route_triton._LOGITS_OF_DOZENS, route_triton._LOGITS]
    many, few = (route_triton.route(one, router, Routing(6)) for one in (x, x[:rows]))
    assert torch.equal(few.ids_TK, many.ids_TK[:rows])
    assert torch.equal(few.weights_TK, many.weights_TK[:rows])
