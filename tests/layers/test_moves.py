from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.linear import IncomingWeight, Linear
from specengine.layers.moves import Move, Plan, moving_with
from specengine.layers.quantization.method import LayerTensors
from specengine.layers.weights import fill_places, weight_places

META = torch.device("meta")


class Recorder:
    """Owns what it is told, and copies in the reverse order."""

    def __init__(self, *owned: Tensor) -> None:
        self.owned = [id(one) for one in owned]
        self.names: list[str] = []

    def owns(self, tensor: Tensor) -> bool:
        return id(tensor) in self.owned

    def move(self, moves: Sequence[Move]) -> None:
        for one in reversed(moves):
            one.place.copy_(one.tensor)
            self.names.append(one.name)


def test_what_a_mover_owns_moves_when_the_plan_is_carried_out() -> None:
    owned, computed = torch.randn(3), torch.randn(3)
    places = torch.zeros(2, 3)
    recorder = Recorder(owned)
    with moving_with(recorder):
        plan = Plan()
        plan.add("a", places[0], owned)
        plan.add("b", places[1], computed)
        assert not places[0].any()
        assert torch.equal(places[1], computed)
        plan.carry_out()
        plan.carry_out()
    assert torch.equal(places[0], owned)
    assert recorder.names == ["a"]
    Plan().add("c", places[1], owned)
    assert torch.equal(places[1], owned)


def test_tensors_of_a_quantised_layer_move_together() -> None:
    """To another device, here one without memory."""
    scale, codes = torch.ones(2), torch.ones(2, 4)
    given = IncomingWeight(torch.device("cpu"))
    given.take("layer.scale", scale)
    given.take("layer.codes", codes)
    recorder = Recorder(scale, codes)
    with moving_with(recorder):
        layer = LayerTensors.of(given, 2, 4, META)
        assert LayerTensors.of(given, 2, 4).need("scale") is scale
    assert sorted(recorder.names) == ["layer.codes", "layer.scale"]
    assert layer.shaped("codes", 2, 4).device == META
    assert LayerTensors.of(given, 2, 4, META).need("scale").device == META
    assert len(recorder.names) == 2


def test_nothing_moves_where_a_tensor_is_missing() -> None:
    model, weight = nn.ModuleDict({"a": Linear(2, 2), "b": Linear(2, 2)}), torch.ones(2, 2)
    recorder = Recorder(weight)
    with moving_with(recorder), pytest.raises(ModelLoadError, match=r"missing tensor b\.weight"):
        fill_places(weight_places(model, {}), [("a.weight", weight)], "test")
    assert not recorder.names


def test_a_tensor_that_comes_twice_is_refused() -> None:
    model, weight = nn.ModuleDict({"a": Linear(2, 2)}), torch.ones(2, 2)
    with pytest.raises(ModelLoadError, match=r"tensor a\.weight comes twice"):
        fill_places(weight_places(model, {}), [("a.weight", weight)] * 2, "test")
