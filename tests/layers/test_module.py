"""Submodules as attributes of the object."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from specengine.layers.module import Module


class Pair(Module):
    angles: torch.Tensor

    def __init__(self) -> None:
        self.width = 2  # before nn.Module has its own fields
        super().__init__()
        self.first: nn.Module | None = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("angles", torch.zeros(2))


def test_submodule_is_an_attribute_and_what_torch_lists_stays_the_same() -> None:
    pair = Pair()
    assert vars(pair)["first"] is pair.get_submodule("first")
    assert not vars(pair).keys() & {"gain", "angles"}
    assert [name for name, _ in pair.named_modules()] == ["", "first"]
    assert set(pair.state_dict()) == {"first.weight", "first.bias", "gain", "angles"}


def test_submodule_that_is_replaced_is_found_in_both_places() -> None:
    pair = Pair()
    for other in (nn.Linear(2, 3), None):
        pair.first = other
        assert pair.first is other
        assert pair._modules["first"] is other


def test_copied_module_finds_the_copy_of_its_submodule() -> None:
    pair = Pair()
    copied = deepcopy(pair)
    assert copied.first is copied.get_submodule("first")
    assert copied.first is not pair.first


def test_parameter_and_buffer_that_torch_replaces_are_the_new_ones() -> None:
    pair = Pair().to("meta")
    assert pair.gain.is_meta
    assert pair.angles.is_meta
