"""A mixture's output in parts, with what every row runs beside the chosen experts; and the forms to
which rows are rounded before hybrid layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.registry import EXPERT_FORMATS, load_place
from specengine.kernels.experts.packed import PackedExperts
from specengine.kernels.experts.types import Chosen
from specengine.kernels.linear import few_row
from specengine.kernels.linear.fp8_linear import FORMAT
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight
from specengine.layers import linear, sparse_mlp
from specengine.layers.experts import Experts, Router
from specengine.layers.gated_delta import GatedDelta
from specengine.layers.layer_spec import ExpertsSpec, GatedDeltaSpec, LayerSpec
from specengine.layers.linear import Linear
from specengine.layers.linear_cpu import Int8Linear, pack_linears
from specengine.layers.quantization.linears import QuantisedLinear
from specengine.layers.sparse_mlp import SparseMLP

HIDDEN, FORM = 32, Fp8Input()
DELTA = LayerSpec(HIDDEN, 48, 4, 2, 8, 1e-5, gated_delta=GatedDeltaSpec(2, 4, 8, 8, 4))


def make(shared_gate: bool) -> SparseMLP:
    spec = ExpertsSpec(4, 2, 16, shared_size=48, shared_gate=shared_gate)
    made = SparseMLP(HIDDEN, spec)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def quantise(one: Linear) -> None:
    kernel = QuantisedLinear([Fp8Weight.of(one.plain)], one.bias)
    one.use_kernel(kernel, kernel.takes)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts give halves in float32, as their kernels do of few rows."""
    plain = Experts.forward

    def halves(self: Experts, x: Tensor, chosen: Chosen, into: Tensor) -> Tensor:
        return into[:2].copy_(0.5 * plain(self, x, chosen).float())

    def room(self: Experts, x: Tensor) -> Tensor:
        return torch.full((3, *x.shape), torch.nan)

    monkeypatch.setattr(Experts, "forward", halves)
    monkeypatch.setattr(Experts, "room", room)


@pytest.mark.parametrize("gate", ["none", "plain", "packed"])
def test_parts_add_up_to_what_one_sum_gives(
    gate: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, x = make(gate != "none"), torch.randn(5, HIDDEN)
    if gate == "packed":
        assert mlp.shared_expert_gate is not None
        quantise(mlp.shared_expert_gate)
    with torch.inference_mode():
        expected = mlp.parts(x)
        request.getfixturevalue("in_parts")
        found = mlp.parts(x)
    assert expected.shape == (5, HIDDEN)
    assert found.shape == (3, 5, HIDDEN)
    torch.testing.assert_close(found.sum(0), expected)


@pytest.mark.parametrize("in_fp8", ["nothing", "shared expert", "experts"])
def test_a_shared_expert_in_fp8_starts_before_rows_are_routed(
    in_fp8: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, done, choose = make(True), list[str](), Router.choose
    assert mlp.shared_expert is not None
    if in_fp8 == "shared expert":
        quantise(mlp.shared_expert.gate_up_proj)
    elif in_fp8 == "experts":
        pairs = mlp.experts.weights.gate_up, mlp.experts.weights.down
        mlp.experts.use_packed(*(packed_in(FORM, weight) for weight in pairs))

    def logged(self: Router, x: Tensor) -> Chosen:
        done.append("routed")
        return choose(self, x)

    def fork(x: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
        done.append("forked")
        return first(x), second(x)

    monkeypatch.setattr(Router, "choose", logged)
    monkeypatch.setattr(sparse_mlp, "both", fork)
    with torch.inference_mode():
        mlp(torch.randn(5, HIDDEN))
    assert done == (["forked", "routed"] if in_fp8 == "shared expert" else ["routed", "forked"])


def test_a_gate_of_one_output_stays_in_floating_point_when_others_are_quantised() -> None:
    mlp = make(True).bfloat16()
    pack_linears(mlp, "int8")
    assert mlp.shared_expert is not None
    assert mlp.shared_expert_gate is not None
    assert isinstance(mlp.shared_expert.gate_up_proj.kernel, Int8Linear)
    assert not isinstance(mlp.shared_expert_gate.kernel, Int8Linear)


def test_mixture_takes_the_form_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = make(True)
    assert mlp.takes is None
    assert mlp.shared_expert is not None
    quantise(mlp.shared_expert.gate_up_proj)
    assert mlp.takes == FORM
    pairs = mlp.experts.weights.gate_up, mlp.experts.weights.down
    packed = [packed_in(Fp8Input(group=16), weight) for weight in pairs]
    mlp.experts.use_packed(*packed)
    assert mlp.takes == Fp8Input(group=16)
    monkeypatch.setattr(sparse_mlp, "is_traced", lambda: True)
    assert mlp.takes is None


def packed_in(form: Fp8Input, weight: Tensor) -> PackedExperts:
    each: Any = (
        Fp8Weight(one.to(torch.float8_e4m3fn), torch.ones(1, 1), *one.shape, form) for one in weight
    )
    made = PackedExperts.of(load_place(EXPERT_FORMATS["fp8"]), len(weight), each)
    assert made is not None
    return made


@pytest.mark.parametrize("is_quantised", [True, False])
def test_gates_go_beside_a_product_that_completes_its_input(
    is_quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory that was there before the product took any."""
    layer, log = GatedDelta(DELTA, 0), list[object]()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    if is_quantised:
        quantise(layer.in_proj_qkvz)
    assert layer.in_proj_qkvz.completes_input is is_quantised
    project, made = type(layer.in_proj_qkvz).forward, Tensor.new_empty

    def projected(self: Linear, x: Tensor) -> Tensor:
        log.append("product")
        return project(self, x)

    def linear(x: Tensor, *_: object, into: Tensor | None) -> Tensor:
        log.append(None if into is None else into.shape)
        return x.new_ones(len(x), 8)

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        log.append("memory")
        return made(self, *size, **options)

    monkeypatch.setattr(type(layer.in_proj_qkvz), "forward", projected)
    monkeypatch.setattr(few_row, "linear", linear)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(GatedDelta, "_run", lambda self, given, batch: torch.ones(3, 4, 8))
    layer(torch.arange(3), torch.randn(3, HIDDEN), None)  # type: ignore[arg-type]
    expected = ["memory", "product", (3, 8)] if is_quantised else ["product", None]
    assert log[: len(expected)] == expected


def test_a_packed_product_leaves_parts_where_its_kernel_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, HIDDEN)
    for bias in (False, True):
        layer = Linear(HIDDEN, 24, bias)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        quantise(layer)
        assert layer.parts(x).shape == (3, 24)  # on a CPU it does not
        left = torch.ones(2, 3, 24)
        spied = replace(FORMAT, parts=lambda x, weight, left=left: left)
        monkeypatch.setattr(layer.kernel, "formats", [spied])
        assert (layer.parts(x) is left) is not bias
        monkeypatch.undo()


def test_linear_attention_takes_the_form_of_its_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GatedDelta(DELTA, 0)
    assert layer.takes is None
    torch.nn.init.normal_(layer.in_proj_qkvz.plain)
    quantise(layer.in_proj_qkvz)
    assert layer.takes == FORM
    monkeypatch.setattr(linear, "is_traced", lambda: True)
    assert layer.takes is None
