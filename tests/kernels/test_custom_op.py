"""Which form of an operation runs, and what torch.compile sees of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels import dispatch
from specengine.kernels.custom_op import CustomOp
from specengine.kernels.opaque import PLAIN_FORMS


def plain(x: Tensor, factor: float) -> Tensor:
    return x * factor + 0.0


class Scaled(CustomOp):
    """Each form leaves its mark on a number that is not the tensor's."""

    schema = "test_scaled(Tensor x, float factor) -> Tensor"
    torch = staticmethod(plain)

    @staticmethod
    def fake(x: Tensor, factor: float) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def triton(x: Tensor, factor: float) -> Tensor:
        return plain(x, factor) + 100

    @staticmethod
    def native(x: Tensor, factor: float) -> Tensor:
        return plain(x, factor) + 10

    @staticmethod
    def takes_native(x: Tensor, factor: float) -> bool:
        return factor > 1

    @staticmethod
    def takes_triton(x: Tensor, factor: float) -> bool:
        return factor < 5


scaled = Scaled()
ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("backend", "factor", "expected"),
    [
        ("torch", 2.0, 2.0),
        ("native", 2.0, 12.0),
        ("native", 0.5, 0.5),  # which C does not take
        ("triton", 2.0, 102.0),
        ("triton", 7.0, 7.0),  # which Triton does not take
    ],
)
def test_form_that_is_asked_for_runs_where_it_takes_the_arguments(
    backend: Any, factor: float, expected: float
) -> None:
    assert scaled(ONES, factor, backend=backend).unique().tolist() == [expected]


@pytest.mark.parametrize(("has_native", "expected"), [(True, 12.0), (False, 2.0)])
def test_auto_on_a_cpu_is_c_where_it_fits(
    has_native: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch.native, "fits", lambda x: has_native)
    assert scaled(ONES, 2.0).unique().tolist() == [expected]


def test_torch_compile_sees_one_node_that_runs_as_the_operation_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody says when tracing begins or ends; a graph that was compiled before runs the form that
    is chosen when it runs."""
    monkeypatch.setattr(dispatch.native, "fits", lambda x: True)
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def twice(x: Tensor) -> Tensor:
        return scaled(scaled(x, 2.0), 2.0)

    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    assert torch.equal(compiled(ONES), twice(ONES))
    assert compiled(ONES).unique().tolist() == [34.0]
    (target,) = {*targets}
    assert len(targets) == 2
    assert PLAIN_FORMS[target] is plain
    monkeypatch.setattr(dispatch.native, "fits", lambda x: False)
    assert compiled(ONES).unique().tolist() == [4.0]


def test_operation_without_a_schema_is_traced_through() -> None:
    class Through(CustomOp):
        torch = staticmethod(plain)

        @staticmethod
        def takes_triton(*given: Any) -> bool:
            return False

    through = Through()
    compiled = torch.compile(lambda x: through(x, 3.0), backend="eager", fullgraph=True)
    assert compiled(ONES).unique().tolist() == [3.0]
